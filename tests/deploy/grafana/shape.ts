// SPDX-License-Identifier: Apache-2.0
// What a dashboard of these is, in the types of @grafana/schema.
import type { AnnotationQuery, Dashboard, DataSourceRef, FieldConfig, Panel, RowPanel } from '@grafana/schema';
import type { Options as StatOptions } from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type {
  FieldConfig as TimeSeriesFieldConfig,
  Options as TimeSeriesOptions,
} from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

// JSON has an enum's values where TypeScript wants its members.
type Json<T> = T extends string
  ? `${T}`
  : T extends number
    ? `${T}` extends `${infer Value extends number}`
      ? Value
      : never
    : T extends (infer Item)[]
      ? Json<Item>[]
      : T extends object
        ? { [Key in keyof T]: Json<T[Key]> }
        : T;

// The data source's own query type is not part of @grafana/schema.
interface Target<IsInstant extends boolean> {
  datasource: DataSourceRef;
  expr: string;
  instant: IsInstant;
  legendFormat: string;
  range: IsInstant extends true ? false : true;
  refId: string;
}

type Filled = Required<Pick<Panel, 'description' | 'gridPos' | 'id' | 'title'>>;

interface Drawn<Type extends string, Options, Custom, IsInstant extends boolean>
  extends Omit<Panel, keyof Filled | 'fieldConfig' | 'options' | 'targets' | 'type'>,
    Filled {
  fieldConfig: { defaults: Omit<FieldConfig, 'custom'> & { custom?: Custom }; overrides: never[] };
  options: Options;
  targets: Array<Target<IsInstant>>;
  type: Type;
}

// Options that a panel leaves out have their defaults.
type AnyPanel =
  | Drawn<'stat', Partial<StatOptions>, never, true>
  | Drawn<'timeseries', TimeSeriesOptions, TimeSeriesFieldConfig, false>
  | (Omit<RowPanel, 'type'> & { type: 'row' });

// What the Prometheus data source stores beside the fields of every annotation query.
interface Marks extends Omit<AnnotationQuery, 'target'> {
  expr: string;
  titleFormat: string;
  useValueForTime: boolean;
}

export type Checked = Json<
  Omit<Dashboard, 'panels' | 'annotations'> & { panels: AnyPanel[]; annotations: { list: Marks[] } }
>;

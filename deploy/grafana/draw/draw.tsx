// SPDX-License-Identifier: Apache-2.0
// A dashboard's panels with Grafana's own components, from results of Prometheus.
import '@fontsource/inter/latin-400.css';
import '@fontsource/inter/latin-500.css';

import {
  applyNullInsertThreshold,
  createTheme,
  dateTime,
  FieldType,
  getDisplayProcessor,
  getFieldDisplayValues,
  ThemeContext,
  toDataFrame,
  type DataFrame,
  type TimeRange,
} from '@grafana/data';
import { BigValue, GlobalStyles, PanelChrome, TimeSeries } from '@grafana/ui';
import { createRoot } from 'react-dom/client';

type Sample = [seconds: number, value: string];

interface Series {
  metric: Record<string, string>;
  value?: Sample; // of an instant query
  values?: Sample[];
}

interface Input {
  dashboard: any;
  from: number; // seconds
  to: number;
  step: number;
  results: Record<string, Record<string, Series[]>>; // by panel id and refId
}

const CELL_HEIGHT = 30;
const GAP = 8;
const HEADER_HEIGHT = 48;
const COLUMNS = 24;
const WIDTH = window.innerWidth - 2 * GAP;

const input: Input = JSON.parse(document.getElementById('input')!.textContent!);
const theme = createTheme({ colors: { mode: 'dark' } });
const timeZone = 'utc';
const from = dateTime(input.from * 1000);
const to = dateTime(input.to * 1000);
const timeRange: TimeRange = { from, to, raw: { from, to } };

function legend(format: string, labels: Record<string, string>): string {
  return format.replace(/{{\s*(\w+)\s*}}/g, (_, label) => labels[label] ?? '');
}

function frames(panel: any): DataFrame[] {
  const defaults = panel.fieldConfig.defaults;
  const found: DataFrame[] = panel.targets.flatMap((target: any) =>
    input.results[panel.id][target.refId].map((series) => {
      const samples = series.values ?? [series.value!];
      const frame = toDataFrame({
        refId: target.refId,
        fields: [
          {
            name: 'Time',
            type: FieldType.time,
            config: { interval: input.step * 1000 },
            values: samples.map(([seconds]) => seconds * 1000),
          },
          {
            name: 'Value',
            type: FieldType.number,
            labels: series.metric,
            config: { ...defaults, displayNameFromDS: legend(target.legendFormat, series.metric) },
            values: samples.map(([, value]) => Number(value)),
          },
        ],
      });
      for (const field of frame.fields) {
        field.display = getDisplayProcessor({ field, theme, timeZone });
      }
      return frame;
    })
  );
  found.forEach((frame, seriesIndex) => {
    frame.fields[1].state = { seriesIndex };
  });
  return found;
}

function Stat({ panel, width, height }: any) {
  const { options, fieldConfig } = panel;
  const values = getFieldDisplayValues({
    data: frames(panel),
    fieldConfig,
    reduceOptions: options.reduceOptions,
    replaceVariables: (text) => text,
    theme,
    timeZone,
  });
  return (
    <div style={{ display: 'flex', gap: GAP }}>
      {values.map((value, index) => (
        <BigValue
          key={index}
          colorMode={options.colorMode}
          count={values.length}
          graphMode={options.graphMode}
          height={height}
          justifyMode={options.justifyMode}
          text={options.text}
          textMode={options.textMode}
          theme={theme}
          value={value.display}
          width={width / values.length - GAP}
        />
      ))}
    </div>
  );
}

function Graph({ panel, width, height }: any) {
  // As the time series panel does: what is missing becomes a gap.
  const ends = { refFieldPseudoMin: from.valueOf(), refFieldPseudoMax: to.valueOf() };
  const data = frames(panel).map((frame) => applyNullInsertThreshold({ frame, ...ends }));
  if (data.length === 0) {
    return <p style={{ lineHeight: `${height}px`, textAlign: 'center' }}>{panel.fieldConfig.defaults.noValue}</p>;
  }
  return (
    <TimeSeries
      frames={data}
      height={height}
      legend={panel.options.legend}
      options={panel.options}
      timeRange={timeRange}
      timeZone={timeZone}
      width={width}
    />
  );
}

function Panel({ panel }: any) {
  const { x, y, w, h } = panel.gridPos;
  const column = WIDTH / COLUMNS;
  const width = w * column - GAP;
  const height = h * (CELL_HEIGHT + GAP) - GAP;
  const place = { left: GAP + x * column, position: 'absolute', top: HEADER_HEIGHT + y * (CELL_HEIGHT + GAP) } as const;
  if (panel.type === 'row') {
    return <h4 style={{ ...place, lineHeight: `${height}px` }}>{panel.title}</h4>;
  }
  const Content = panel.type === 'stat' ? Stat : Graph;
  return (
    <div style={place}>
      <PanelChrome title={panel.title} description={panel.description} width={width} height={height}>
        {(innerWidth, innerHeight) => <Content panel={panel} width={innerWidth} height={innerHeight} />}
      </PanelChrome>
    </div>
  );
}

createRoot(document.getElementById('root')!).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <h3 style={{ left: 2 * GAP, lineHeight: `${HEADER_HEIGHT}px`, position: 'absolute' }}>{input.dashboard.title}</h3>
    <span style={{ lineHeight: `${HEADER_HEIGHT}px`, position: 'absolute', right: 2 * GAP }}>
      {from.utc().format('YYYY-MM-DD HH:mm')} to {to.utc().format('HH:mm')} UTC
    </span>
    {input.dashboard.panels.map((panel: any) => (
      <Panel key={panel.id} panel={panel} />
    ))}
  </ThemeContext.Provider>
);

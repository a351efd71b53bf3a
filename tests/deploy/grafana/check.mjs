// SPDX-License-Identifier: Apache-2.0
// node check.mjs DASHBOARD.json...: type-check dashboards; run where node_modules/ is.
import { readFileSync } from 'node:fs';
import { resolve } from 'node:path';
import ts from 'typescript';

const options = {
  module: ts.ModuleKind.ESNext,
  moduleResolution: ts.ModuleResolutionKind.Node10, // the types of panels are not among the exports
  noEmit: true,
  skipLibCheck: true, // only what is used of the declarations concerns us
  strict: true,
  target: ts.ScriptTarget.ES2022,
  types: [],
};

// Each dashboard becomes a source file beside shape.ts, on no disk.
const sources = new Map(
  process.argv.slice(2).map((path) => [
    resolve(`${path.split('/').at(-1)}.ts`),
    `import type { Checked } from './shape';\nexport default ${readFileSync(path, 'utf8').trim()} satisfies Checked;\n`,
  ])
);
const host = ts.createCompilerHost(options);
const { fileExists, readFile } = host;
host.fileExists = (path) => sources.has(path) || fileExists(path);
host.readFile = (path) => sources.get(path) ?? readFile(path);

const problems = ts.getPreEmitDiagnostics(ts.createProgram([...sources.keys()], options, host));
if (sources.size === 0 || problems.length > 0) {
  console.error(ts.formatDiagnostics(problems, { ...host, getNewLine: () => '\n' }));
  process.exit(1);
}

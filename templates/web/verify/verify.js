// The page around check.js: a button, a table and a file to save.
import { check } from "./check.js";

function show(verdict) {
  const body = document.querySelector("#cases tbody");
  body.replaceChildren();
  for (const result of verdict.cases) {
    for (const output of result.outputs.length ? result.outputs : [{ name: "", passed: false, reasons: result.reasons, metrics: null }]) {
      const row = body.insertRow();
      for (const text of [result.name, output.name, output.passed ? "passed" : output.reasons.join("; "), output.metrics?.max_abs ?? "exact"]) row.insertCell().textContent = text;
      row.className = output.passed ? "passed" : "failed";
    }
  }
  document.querySelector("#cases").hidden = false;
  const save = document.querySelector("#save");
  save.href = URL.createObjectURL(new Blob([`${JSON.stringify(verdict, null, 2)}\n`], { type: "application/json" }));
  save.hidden = false;
}

const button = document.querySelector("#run");
const said = document.querySelector("#said");
button.addEventListener("click", async () => {
  button.disabled = true;
  said.textContent = "Running ...";
  try {
    const verdict = await check({ onProgress: ({ loaded, total }) => (said.textContent = `Loading: ${Math.floor((100 * loaded) / total)} %`) });
    show(verdict);
    said.textContent = `${verdict.status}: ${verdict.cases.length} cases in ${verdict.runtime.name} ${verdict.runtime.version}, ${verdict.runtime.device}.`;
  } catch (error) {
    said.textContent = error.message;
  }
  button.disabled = false;
});
if (location.hash === "#run") button.click();

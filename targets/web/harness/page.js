// The page that a browser runs: it takes golden inputs from the server, runs the bundle's own loader, posts the answers.
import { work } from "./work.js";

const settings = await (await fetch("../settings")).json();
const brands = await navigator.userAgentData?.getHighEntropyValues(["fullVersionList"]);
const engine = brands?.fullVersionList.find(({ brand }) => brand === "Chromium");
const host = {
  engine: engine ? "Chromium" : "browser",
  version: engine?.version ?? navigator.userAgent,
  isolated: crossOriginIsolated,
};
await work(new URL("../", import.meta.url).href, await import(`../bundle/${settings.module}`), settings, host);

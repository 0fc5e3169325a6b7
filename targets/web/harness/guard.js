// Loaded first, as a classic script: whatever goes wrong on the page is told to the server at once, in the browser's
// own words. A failed element (a script that isn't there) only shows in the capturing phase.
"use strict";
{
  const tell = (text) => fetch("../error", { method: "POST", body: text, keepalive: true });
  addEventListener(
    "error",
    (event) => {
      const at = event.target;
      if (at && at !== window) tell(`${at.localName} ${at.src || at.href} can't be loaded`);
      else tell(`${event.message} (${event.filename}:${event.lineno})`);
    },
    true,
  );
  addEventListener("unhandledrejection", (event) => tell(String(event.reason?.message ?? event.reason)));
  addEventListener("securitypolicyviolation", (event) => tell(`the page's CSP (${event.effectiveDirective}) blocked ${event.blockedURI}`));
}

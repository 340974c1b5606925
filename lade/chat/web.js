() => {
  // What Gradio has no setting for: names for screen readers, and Escape to stop.
  const describe = (id, attributes) => {
    const element = document.getElementById(id);
    for (const [name, value] of Object.entries(attributes)) element?.setAttribute(name, value);
  };
  describe("log", { role: "log", "aria-label": "Conversation", "aria-live": "off", tabindex: "0" });
  describe("note", { "aria-live": "polite" });
  describe("race-note", { "aria-live": "polite" });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const id of ["stop", "race-stop"]) document.getElementById(id)?.click();
  });
}

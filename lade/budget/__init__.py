"""How much of a draft to verify, by measured costs and measured trust; no tensor and no model."""

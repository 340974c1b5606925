"""What is exact for a model: rules, a self-check, what it found, and the plan that follows."""

"""Load on `lade serve`: many clients at once, of whom many do not behave."""

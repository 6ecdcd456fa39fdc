"""The formulas, in plain torch."""

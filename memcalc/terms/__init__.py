"""From a grid of strategies to its ledger: the only caller of the memory formulas."""

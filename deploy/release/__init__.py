"""What makes a release: the package's address, notes, a formula, the table of wheels."""

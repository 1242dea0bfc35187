"""Constrains answers to a format: from a caller's grammar or schema to the token mask of a step.

structured     one model's grammars and masks; checks of finished answers; used by other packages
calls          makes a grammar from the functions that may be called
schemas        JSON Schemas as values: reads, checks, walks and rebuilds them
unenforced     leaves out the parts of a schema that no grammar can enforce, and lists them
patterns       regular expressions: which ones can be enforced, the lengths of matches; formats
schema_bounds  tightens a schema: bounds strings, arrays and numbers
compiling      compiles a grammar to the matchers of sequences, with llguidance
tokenizer      a model's tokens in the form that grammars need
matching       tracks how far a sequence is in its grammar; the masks of a step
"""

"""Constrains answers to a caller's grammar or schema, by masks of the tokens that may come next.

structured     compiles one model's grammars, masks its logits, checks finished answers
calls          makes a grammar from the functions that may be called
schemas        reads, checks, walks and rebuilds JSON Schemas
unenforced     leaves out the keywords of a schema that no grammar can enforce
patterns       tells which regular expressions and formats of strings can be enforced
schema_bounds  bounds strings, arrays and numbers in a schema
compiling      compiles a grammar to matchers, with llguidance
tokenizer      a model's tokens in the form that grammars need
matching       tracks each sequence's place in its grammar, and makes masks
"""

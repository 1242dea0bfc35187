"""Answers held to a form: from what a caller asks to the mask of a step.

structured     what one model can be held to, and whether an answer fits; the face of this room
calls          functions that may be called → a grammar
schemas        JSON Schemas as values: read, walked, rebuilt
drafts         checked by their own draft, said in the newest one's words
enforcement    what of a schema a grammar can hold, and what is left to be checked
disjoint       proofs that no value fits two schemas
patterns       regular expressions: how long they match, all but some words
forms          the forms of a schema that may be compiled, tightest first
references     how far a schema leads through its references
shaping        a schema drawn tighter, so that a small model stays on course
compiling      a grammar → what rows are matched against, by llguidance
trial          a first try in the sandbox, so that no grammar ends this process
matching       where a row stands, and the masks of a step
"""

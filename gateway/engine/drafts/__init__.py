"""Speculative decoding: a pass reads several tokens of a sequence, some of them before they have
been chosen.

Some of these tokens are certain, because a grammar allows only one continuation. The others are a
draft, that is, a guess. The pass returns the logits after each token of the draft, from which
tokens are chosen as if they were decoded one by one. The draft is accepted up to its first token
that differs from the chosen one, so a wrong draft costs time, but never changes an answer.

prompt_lookup  drafts copied from a sequence's context
draft_model    drafts from a smaller model
draft_policy   the number of speculative tokens, and the source of drafts
"""

"""Speculative decoding: one pass reads several tokens of a sequence before they are chosen.

Some of these tokens are forced by a grammar. The others are a draft, which is a guess. A draft is
accepted up to its first token that differs from the token chosen there, so it never changes an
answer.

prompt_lookup  drafts copied from a sequence's context
draft_model    drafts from a smaller model
head_drafter   drafts from the model's own head
shared_kv_drafter  drafts from Gemma 4's drafter
draft_policy   the number of speculative tokens, and the source of drafts
"""

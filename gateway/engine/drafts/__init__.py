"""Tokens that are read ahead of their choice, several in one pass.

Some are certain: a grammar may allow only one continuation. Others are drafts. The pass that reads
a draft also gives the logits after each of its tokens, and tokens are chosen from those as they
would be one by one. A draft counts as far as its tokens were chosen, so it costs time, and never
changes an answer.

prompt_lookup  drafts out of a sequence's own context
draft_model    drafts by a smaller model
draft_policy   the number of tokens read ahead, and the source of drafts
"""

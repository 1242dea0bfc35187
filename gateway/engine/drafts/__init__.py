"""Tokens that are read ahead of their choice, several in one pass.

Some are certain: a grammar may allow only one continuation. Others are drafts. The pass that reads
a draft also gives the logits after each of its tokens, and they are chosen from those as they would
be one by one. As much of a draft counts as was chosen; so a draft costs time, and never changes an
answer.

prompt_lookup  drafts out of a sequence's own context
draft_model    drafts by a smaller model
draft_policy   how many tokens are read ahead, and whose drafts
"""

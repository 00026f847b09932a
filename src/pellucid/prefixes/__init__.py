"""`pellucid prefixes`: the first sentences of thinking about a task's questions, by a teacher or a student model.

command.py finds the missing prefixes and generates them with a local model. teacher.py requests them from an
OpenAI-compatible endpoint instead. cleaning.py turns an answer into a prefix, and journal.py writes it to the file.
Torch is only imported for a student, so that asking a teacher starts fast.
"""

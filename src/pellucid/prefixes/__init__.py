"""`pellucid prefixes`: the first sentences of thinking about a task's questions, by a teacher or a student model.

command.py finds which prefixes are missing and asks for them: teacher.py asks an OpenAI-compatible endpoint, student.py
a local model. cleaning.py makes a prefix of an answer, and journal.py writes it to the file. Only student.py imports
torch, so that asking a teacher starts fast.
"""

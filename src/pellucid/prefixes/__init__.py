"""How a teacher or a student begins to think about the questions of a task."""

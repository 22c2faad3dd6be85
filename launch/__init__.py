"""Starting the ranks of a job, and ending them: knows processes, not what they train."""

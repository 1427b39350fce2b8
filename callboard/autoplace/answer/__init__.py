"""The answer for people and programs: reports, pictures, and changes to their files."""

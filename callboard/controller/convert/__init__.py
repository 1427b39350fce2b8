"""How do the stream's messages become events, and commands messages?"""

"""Our study of the suggested radius: is it as good as one that was searched for?"""

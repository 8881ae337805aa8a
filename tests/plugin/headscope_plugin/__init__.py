"""Extensions of headscope, one file each."""

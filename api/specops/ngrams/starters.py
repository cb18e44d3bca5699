"""First words of user messages, so that a model writes messages of many kinds.

With sampling alone, a model writes similar messages over and over.
"""

STARTERS: tuple[str, ...] = (
    # questions
    *("What is the", "What are some", "What does", "Why do", "Why is it", "How can I", "How does"),
    *("How do you", "Who was", "When did", "Where can", "Which of", "Is it true that", "Can you"),
    *("What happens when", "What would you", "What is the difference between", "How many"),
    *("Do you know", "Should I", "I wonder", "Tell me about", "What do you think about"),
    # explanations
    *("Explain", "Explain like I'm five", "Describe the process of", "Define", "Compare"),
    *("What are the advantages of", "Give me an overview of", "Explain step by step how"),
    *("What are the main causes of", "In simple words,", "Teach me", "Help me understand"),
    # writing
    *("Write a short story about", "Write a poem about", "Write an email to", "Write a letter"),
    *("Write a blog post", "Write a product description for", "Create a slogan"),
    *("Write a dialogue", "Write a speech", "Write a review of", "Draft a message", "Compose a"),
    *("Write a summary of", "Write instructions for", "Write the opening paragraph of"),
    *("Write a job advertisement for",),
    # lists and plans
    *("List five", "List ten", "Give me three", "Suggest some", "Name a few", "Create a plan for"),
    *("Make a checklist", "Give me a recipe for", "Plan a trip to", "Recommend", "Brainstorm"),
    *("Give me tips for", "Create a table of", "Make a schedule for", "Come up with"),
    # work on a text
    *("Rewrite this sentence:", "Summarize the following text:", "Correct the grammar:"),
    *("Translate into French:", "Make this more polite:", "Extract the names from this text:"),
    *("Paraphrase:", "Find the mistake in", "Complete this sentence:", "Classify the following"),
    *("Turn this into a list:", "Shorten this:", "Answer the question from this text:"),
    # code and numbers
    *("Write a Python function", "Write a JavaScript", "What does this code do?", "Write an SQL"),
    *("Fix this code:", "How do I use a loop", "Explain the following code:", "Write a program"),
    *("Write a regular expression", "Write HTML for", "Write a bash script", "Return JSON with"),
    *("Calculate", "Solve:", "If a train", "A shop sells", "How much is", "What is 15% of"),
    *("There are", "Let x be", "Convert", "What is the probability"),
    # talk
    *("Hello", "Hi, I", "Good morning", "Thank you", "I feel", "I'm looking for", "I need help"),
    *("My friend", "My daughter", "I have a problem with", "I want to learn", "Let's play"),
    *("Imagine you are", "You are a", "Act as", "Pretend", "I just", "Can we talk about"),
    *("Sorry,", "What's your favourite", "Tell me a joke", "Tell me something about"),
    # other languages
    *("Was ist", "Wie kann ich", "Schreibe", "Erkläre", "Nenne drei", "Warum", "Ich möchte"),
    *("Qu'est-ce que", "Comment", "Écris", "Explique", "Donne-moi", "Pourquoi", "Je voudrais"),
    *("¿Qué es", "¿Cómo puedo", "Escribe", "Explica", "Dame una lista de", "¿Por qué", "Quiero"),
    *("Che cos'è", "Come posso", "Scrivi", "Spiega", "O que é", "Como posso", "Escreva"),
    *("Wat is", "Hoe kan ik", "Что такое", "Как", "什么是", "请写", "日本の", "क्या"),
)

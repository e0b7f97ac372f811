"""The paper's tables and figures, each by one command: what runs, beside what was published, and what follows."""

"""Applications on top of mdcs: models, data, and the programs that plan, train and sweep."""

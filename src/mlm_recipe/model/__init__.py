"""RoBERTa for masked language modelling in named axes."""

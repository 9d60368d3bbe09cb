"""After the training: the model folder, its evaluation, the report and the record that experiments are compared by."""

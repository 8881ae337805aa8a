"""Attribution of a model's predictions to its heads: objectives, and captum over head gates."""

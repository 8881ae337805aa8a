"""Translation models as CTranslate2 runs them: one folder of weights, vocabularies and options."""

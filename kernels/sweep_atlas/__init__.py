"""Maps of a sweep: in which settings an investigation's wrong numbers tell their causes apart."""

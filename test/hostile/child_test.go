package hostile_test

func beChild(string) {}

//go:build race

package service

// buildFlags build the server as these tests are built, so that nothing is
// compiled twice and the server's own races are found.
var buildFlags = []string{"-race"}

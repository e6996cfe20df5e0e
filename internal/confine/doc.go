// Package confine starts programs that are not trusted, with as little as they
// need, and ends everything they started.
//
// A program has a clean environment, a private working directory, a session and
// process group of its own, no way to gain privileges, limits on what it uses, and
// sees of the file system what was declared for it, as far as the kernel's
// Landlock reaches. Where the host is root, each program runs as a user of its
// own.
//
// Between the host and the program stands a keeper: this same binary, started
// anew. The keeper adopts whatever the program leaves behind (it is a
// "subreaper"), so that a process that forks twice or makes itself a session of
// its own stays within reach. It ends the whole tree when the program ends, when
// the host asks for it, and when the host is gone, however it went. The keeper
// starts the program by way of another start of this binary, the entry, which
// takes privileges from itself and becomes the program.
//
// Both run before main, in this package's initialization: so every binary that
// links this package, a test too, can start programs, and starting takes a few
// milliseconds, since what the rest of a large binary sets up is not waited for.
//
// It does not speak with the program, and does not decide which one may run.
package confine

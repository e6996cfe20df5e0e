package telemetry

import (
	"context"
	"log"
	"log/slog"
	"strings"
)

// TakeStandard sends the lines of the standard library's own log to a logger, for
// the whole process: package net/http writes there without asking anybody. Lines
// that quote a server come without the quote, at level debug: what a server sends
// is foreign text, may hold a user's data, and may be sent as often as it likes.
func TakeStandard(to *slog.Logger) {
	log.SetFlags(0)
	log.SetOutput(standard{to})
}

type standard struct{ log *slog.Logger }

// Write implements io.Writer for one line.
func (s standard) Write(line []byte) (int, error) {
	text, _, foreign := strings.Cut(strings.TrimSpace(string(line)), " starting with ")
	level := slog.LevelWarn
	if foreign {
		level = slog.LevelDebug
	}
	s.log.Log(context.Background(), level, "standard library", "text", text)
	return len(line), nil
}

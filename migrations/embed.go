// Package migrations holds the database schema as numbered SQL files, applied
// in order by package postgres. Migrations go forward only, and a merged one is
// never edited.
package migrations

import "embed"

// FS holds the migration files, named 0001_name.sql and so on.
//
//go:embed *.sql
var FS embed.FS

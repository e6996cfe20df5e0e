package contract

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// maxPath is the longest path, in bytes, that within accepts.
const maxPath = 4096

// within says whether path names root itself or something below it, judged by
// its letters alone: it follows no link and asks no file system. Both must be
// clean absolute paths (see cleanPath); anything else is not within. One slash
// at the end of either is ignored.
func within(path, root string) bool {
	if !cleanPath(path) || !cleanPath(root) {
		return false
	}
	path, root = strings.TrimSuffix(path, "/"), strings.TrimSuffix(root, "/")
	return path == root || strings.HasPrefix(path, root) && path[len(root)] == '/'
}

// cleanPath says whether s is an absolute path that every reader takes to mean
// the same place. It refuses relative paths, empty segments, segments that a
// file system or a web server may read as . or .. (see cleanSegment), percent
// encodings of any kind, and characters outside the safe set (see safeRune).
func cleanPath(s string) bool {
	if len(s) > maxPath || s == "" || s[0] != '/' {
		return false
	}
	if s == "/" {
		return true
	}
	if !safeText(s) || percentEncoded(s) {
		return false
	}
	for segment := range strings.SplitSeq(strings.TrimSuffix(s[1:], "/"), "/") {
		if !cleanSegment(segment) {
			return false
		}
	}
	return true
}

// cleanSegment refuses an empty segment, one that begins with .. (also ..; which
// servlet containers cut to ..), and one that ends with a dot or a space, which
// Windows drops.
func cleanSegment(s string) bool {
	return s != "" && !strings.HasPrefix(s, "..") && !strings.HasSuffix(s, ".") && !strings.HasSuffix(s, " ")
}

// percentEncoded says whether s has something that a decoder would decode: %2e,
// %252e, %c0%ae, %u002e. A lone percent sign is a letter like others.
func percentEncoded(s string) bool {
	for i := 0; i+2 < len(s); i++ {
		if s[i] == '%' && (s[i+1]|0x20 == 'u' || isHex(s[i+1]) && isHex(s[i+2])) {
			return true
		}
	}
	return false
}

func isHex(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c|0x20 && c|0x20 <= 'f'
}

// safeText says whether s is UTF-8 of safe runes only.
func safeText(s string) bool {
	for i := 0; i < len(s); {
		if c := s[i]; c < utf8.RuneSelf {
			if c < 0x20 || c == 0x7f || c == '\\' {
				return false
			}
			i++
			continue
		}
		r, size := utf8.DecodeRuneInString(s[i:])
		if r == utf8.RuneError && size == 1 || !safeRune(r) {
			return false
		}
		i += size
	}
	return true
}

// safeRune says whether a character outside ASCII may stand in a path. The safe
// set is letters, marks and decimal digits, for names in every script, less
// those that normalisation or a font can turn into a separator, a dot or
// nothing:
//
//   - Everything else is refused by its class: the lookalikes of slash, dot and
//     backslash are punctuation or symbols (U+FF0F, U+2044, U+2215, U+29F8,
//     U+FF0E, U+2024, U+2025, U+2026, U+FF3C …), and so are the characters that
//     NFKC expands to text with one of them (U+2488 "1.", U+2105 "c/o", U+33A7
//     with U+2215, U+00BD with U+2044). Controls, format characters (zero width,
//     direction), spaces other than U+0020, private use and unassigned code
//     points are refused alike.
//   - Default-ignorable letters and marks vanish under NFKC_Casefold, so that a
//     dot, one of them and a dot would become two dots.
//   - The overlays U+0337 and U+0338 draw a slash over what is before them, and a
//     few letters are dots or strokes only.
//
// A test holds that no safe rune has an NFKC or NFKD form with a dot, slash,
// backslash, percent sign, control or unsafe rune in it.
func safeRune(r rune) bool {
	if !unicode.In(r, unicode.L, unicode.M, unicode.Nd) {
		return false
	}
	if unicode.In(r, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector) {
		return false
	}
	switch r {
	case 0x0337, 0x0338, // overlays of a slash
		0x20D2, 0x20D3, 0x20E5, 0x20EB, // overlays of strokes and a backslash
		0x3033, 0x3034, 0x3035, // kana repeat marks shaped like slashes
		0xA78F,         // sinological dot
		0x013F, 0x0140: // L with a middle dot, which NFKC sets free
		return false
	}
	return true
}

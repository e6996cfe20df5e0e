package elicitation

import (
	"math/big"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// secrets are words for what only its owner and who issued it should know. Each is
// looked for as whole words, whatever the spelling: api_key, apiKey, API key and
// a-p-i-k-e-y are the same, in letters of any script that look like these.
var secrets = []string{
	"password", "passwords", "passwd", "pwd", "passphrase", "passcode", "pass phrase", "pass code", "pass word",
	"secret", "secrets", "token", "credential", "credentials", "one time code", "otp", "mnemonic", "seed phrase",
	"api key", "apikey", "api keys", "access key", "secret key", "private key", "encryption key", "ssh key", "signing key", "license key",
	"card number", "credit card", "debit card", "cardnumber", "creditcard", "cvv", "cvc", "cvv2", "security code", "iban",
	"ssn", "social security", "pin", "passport number",
	"passwort", "kennwort", "contraseña", "mot de passe", "senha",
}

// asked are words that make a message ask for what it names.
var asked = []string{"enter", "provide", "type", "paste", "give", "tell", "send", "share", "supply", "input", "submit", "need", "what is", "fill in"}

// Secret returns a word for the secret that the form asks for, or "". A field into
// which one can be written asks by its name, its title, its description or its
// format; a message asks where there is such a field for text.
func (f *Form) Secret() string {
	free := false
	for i := range f.fields {
		x := &f.fields[i]
		if x.kind == typeBoolean || x.closed || x.small() {
			continue // nobody can write one there
		}
		free = free || x.kind == typeString
		if strings.EqualFold(x.format, "password") {
			return "password"
		}
		for _, text := range []string{x.name, x.title, x.description} {
			if word := named(text, secrets); word != "" {
				return word
			}
		}
	}
	if free && named(f.Message, asked) != "" {
		return named(f.Message, secrets)
	}
	return ""
}

// fewNumbers is less than any secret of digits has values.
const fewNumbers = 256

// small reports whether the field takes only a few whole numbers.
func (f *field) small() bool {
	return f.kind == typeInteger && f.least != nil && f.most != nil &&
		new(big.Rat).Sub(f.most, f.least).Cmp(big.NewRat(fewNumbers, 1)) < 0
}

// shortest is the least length of a word that is also found when it is written in
// pieces; a shorter one only when each letter stands alone.
const shortest = 6

// named returns the first of the words that the text has, as whole words: written
// together or apart, with a number behind it or not.
func named(text string, words []string) string {
	parts := strings.Fields(spaced(text))
	for _, w := range words {
		if has(parts, strings.ReplaceAll(spaced(w), " ", "")) {
			return w
		}
	}
	return ""
}

// has reports whether parts that follow each other spell the word.
func has(parts []string, word string) bool {
	for i := range parts {
		rest, single := word, true
		for j, part := range parts[i:] {
			single = single && utf8.RuneCountInString(part) == 1
			left, ok := strings.CutPrefix(rest, part)
			if last := strings.TrimRight(part, "0123456789"); !ok && last == rest {
				left, ok = "", true // password2
			}
			if !ok {
				break
			}
			if rest = left; rest == "" {
				if j == 0 || single || len(word) >= shortest {
					return true
				}
				break
			}
		}
	}
	return false
}

// spaced writes a text in lower case with one space around each word, and letters
// that look like Latin ones as these. A capital after a small letter begins a word,
// and what is neither letter nor digit ends one; marks and what is invisible do
// neither, so that they hide nothing.
func spaced(text string) string {
	var b strings.Builder
	b.WriteByte(' ')
	space, small := true, false
	for _, r := range norm.NFKD.String(text) {
		if like, ok := lookalikes[r]; ok {
			r = like
		}
		switch {
		case unicode.Is(unicode.Cf, r), unicode.Is(unicode.M, r), unicode.Is(unicode.Other_Default_Ignorable_Code_Point, r):
			continue
		case unicode.IsLetter(r) || unicode.IsDigit(r):
			if small && unicode.IsUpper(r) && !space {
				b.WriteByte(' ')
			}
			small = unicode.IsLower(r)
			b.WriteRune(unicode.ToLower(r))
			space = false
		default:
			if !space {
				b.WriteByte(' ')
			}
			space, small = true, false
		}
	}
	if !space {
		b.WriteByte(' ')
	}
	return b.String()
}

// lookalikes are the letters of other scripts that most fonts draw like a Latin
// one (Unicode TR 39), and the small capitals.
var lookalikes = pairs(
	"АВЕЅІЈКМНОРСТУХԌԚԜӀ", "ABESIJKMHOPCTYXGQWI", "авеѕіјкмнорстухԁԛԝһӏ", "abesijkmhopctyxdqwhl",
	"ΑΒΕΖΗΙΚΜΝΟΡΤΥΧϹ", "ABEZHIKMNOPTYXC", "αβεηικμνορσςτυχωϳ", "abenikmvopcctuxwj",
	"օսոցհ", "ounqh", "ɑɡıȷ", "agij",
	"ᴀʙᴄᴅᴇꜰɢʜɪᴊᴋʟᴍɴᴏᴘʀꜱᴛᴜᴠᴡʏᴢ", "abcdefghijklmnoprstuvwyz",
)

// pairs maps the letters of each first text to those of the one behind it.
func pairs(texts ...string) map[rune]rune {
	out := map[rune]rune{}
	for i := 0; i+1 < len(texts); i += 2 {
		to := []rune(texts[i+1])
		for j, r := range []rune(texts[i]) {
			out[r] = to[j]
		}
	}
	return out
}

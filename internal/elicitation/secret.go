package elicitation

import (
	"math/big"
	"strings"
	"unicode"
)

// secrets are words for what only its owner and who issued it should know. Each is
// looked for as whole words, whatever the spelling: api_key, apiKey and API key
// are the same.
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

// named returns the first of the words that the text has, as whole words.
func named(text string, words []string) string {
	plain := spaced(text)
	for _, w := range words {
		if strings.Contains(plain, " "+w+" ") {
			return w
		}
	}
	return ""
}

// spaced writes a text in lower case with one space around each word. A capital
// after a small letter begins a word, and what is neither letter nor digit ends
// one; what is invisible does neither, so that it hides nothing.
func spaced(text string) string {
	var b strings.Builder
	b.WriteByte(' ')
	space, small := true, false
	for _, r := range text {
		switch {
		case unicode.Is(unicode.Cf, r):
			continue
		case unicode.IsLetter(r) || unicode.IsDigit(r) || unicode.Is(unicode.Mn, r):
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

package webhooks

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"strconv"
	"strings"
	"time"

	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// The headers of Standard Webhooks.
const (
	headerID        = "webhook-id"
	headerTimestamp = "webhook-timestamp"
	headerSignature = "webhook-signature"
)

const (
	secretPrefix = "whsec_"
	secretBytes  = 32
)

// mintSecret returns a secret and what its owner is shown of it, once.
func mintSecret() (raw []byte, shown string) {
	raw = make([]byte, secretBytes)
	rand.Read(raw) //nolint:errcheck // crypto/rand.Read never fails since Go 1.24
	return raw, secretPrefix + base64.StdEncoding.EncodeToString(raw)
}

// sealSecret seals a secret for the row of its endpoint; not inside a transaction,
// for it may need the database.
func (s *Service) sealSecret(ctx context.Context, t tenant.ID, endpoint string, raw []byte) ([]byte, error) {
	sealed, err := s.o.Vault.Seal(ctx, t, "webhook_endpoint", endpoint, "secret", raw)
	return sealed, fault.Wrap(err, "seal webhook secret")
}

// openSecrets opens the secrets that sign now: the present one, and the previous
// one while its time lasts.
func (s *Service) openSecrets(ctx context.Context, t tenant.ID, e *sending) ([][]byte, error) {
	sealed := [][]byte{e.secret}
	if len(e.previous) > 0 && e.previousExpire != nil && s.now().Before(*e.previousExpire) {
		sealed = append(sealed, e.previous)
	}
	out := make([][]byte, len(sealed))
	for i, v := range sealed {
		var err error
		if out[i], err = s.o.Vault.Open(ctx, t, "webhook_endpoint", e.endpoint, "secret", v); err != nil {
			return nil, fault.Wrap(err, "open webhook secret")
		}
	}
	return out, nil
}

// signatures returns the value of webhook-signature: one signature for each live
// secret, separated by a space.
func signatures(secrets [][]byte, id string, at time.Time, body []byte) string {
	out := make([]string, len(secrets))
	for i, secret := range secrets {
		mac := hmac.New(sha256.New, secret)
		mac.Write([]byte(id + "." + strconv.FormatInt(at.Unix(), 10) + "."))
		mac.Write(body)
		out[i] = "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
	}
	return strings.Join(out, " ")
}

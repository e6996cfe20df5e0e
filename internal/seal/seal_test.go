package seal

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

func mustKEK(t testing.TB, id string, fill byte) KEK {
	t.Helper()
	k, err := NewLocalKEK(id, bytes.Repeat([]byte{fill}, KeySize))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func mustRing(t testing.TB, primary KEK, others ...KEK) *Ring {
	t.Helper()
	r, err := NewRing(primary, others...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func mustKey(t testing.TB) *DataKey {
	t.Helper()
	_, k, err := mustRing(t, mustKEK(t, "k1", 1)).NewDataKey(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// The vectors of c2sp.org/XAES-256-GCM.
func TestBox_OpensTheSpecificationsVectors(t *testing.T) {
	t.Parallel()
	for _, v := range []struct {
		key      byte
		aad, out string
	}{
		{1, "", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"},
		{3, "c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"},
	} {
		b, err := newBox(bytes.Repeat([]byte{v.key}, KeySize))
		if err != nil {
			t.Fatal(err)
		}
		ct, _ := hex.DecodeString(v.out)
		got, err := b.open(append([]byte("ABCDEFGHIJKLMNOPQRSTUVWX"), ct...), []byte(v.aad))
		if err != nil || string(got) != "XAES-256-GCM" {
			t.Errorf("key %d: %q, %v", v.key, got, err)
		}
	}
}

func TestDataKey_SealOpen(t *testing.T) {
	t.Parallel()
	k, other := mustKey(t), mustKey(t)
	for _, size := range []int{0, 1, 15, 16, 17, 1500, 1 << 16} {
		plain, aad := bytes.Repeat([]byte{'p'}, size), AAD("tenant", "kind", "id", "field")
		sealed, err := k.Seal(plain, aad)
		if err != nil || len(sealed) != size+Overhead {
			t.Fatalf("size %d: %d bytes, %v", size, len(sealed), err)
		}
		if size > 15 && bytes.Contains(sealed, plain) {
			t.Fatal("the plaintext is in the sealed value")
		}
		again, _ := k.Seal(plain, aad)
		if bytes.Equal(sealed, again) {
			t.Fatal("sealing is deterministic")
		}
		if got, err := k.Open(sealed, aad); err != nil || !bytes.Equal(got, plain) {
			t.Fatalf("size %d: open: %v", size, err)
		}
		if _, err := other.Open(sealed, aad); !errors.Is(err, ErrOpen) {
			t.Errorf("another key opens it: %v", err)
		}
		for _, bad := range [][]byte{nil, AAD("tenant", "kind", "id", "fiel"), AAD("tenantkind", "id", "field"), append(bytes.Clone(aad), 0)} {
			if _, err := k.Open(sealed, bad); !errors.Is(err, ErrOpen) {
				t.Errorf("other additional data opens it: %v", err)
			}
		}
	}
}

func TestDataKey_OpenRefusesEveryTruncationAndFlip(t *testing.T) {
	t.Parallel()
	k, aad := mustKey(t), []byte("a")
	sealed, err := k.Seal([]byte("some secret"), aad)
	if err != nil {
		t.Fatal(err)
	}
	for n := range sealed {
		if _, err := k.Open(sealed[:n], aad); err == nil {
			t.Errorf("opens at %d of %d bytes", n, len(sealed))
		}
		flipped := bytes.Clone(sealed)
		flipped[n] ^= 1
		if _, err := k.Open(flipped, aad); err == nil {
			t.Errorf("opens with byte %d flipped", n)
		}
	}
	if _, err := k.Open(append(bytes.Clone(sealed), 0), aad); !errors.Is(err, ErrOpen) {
		t.Errorf("opens with a byte added: %v", err)
	}
}

func TestAAD_IsInjective(t *testing.T) {
	t.Parallel()
	lists := [][]string{{}, {""}, {"", ""}, {"ab"}, {"a", "b"}, {"ab", ""}, {"", "ab"}, {"a\x00", "b"}, {"a", "\x00b"}}
	seen := map[string]int{}
	for i, l := range lists {
		s := string(AAD(l...))
		if j, dup := seen[s]; dup {
			t.Errorf("%q and %q give the same bytes", lists[j], l)
		}
		seen[s] = i
	}
}

func TestDataKey_MACDependsOnKeyPurposeAndData(t *testing.T) {
	t.Parallel()
	k, other := mustKey(t), mustKey(t)
	base := k.MAC("audit", []byte("data"))
	if len(base) != 32 || !bytes.Equal(base, k.MAC("audit", []byte("data"))) {
		t.Fatal("a MAC is 32 bytes and deterministic")
	}
	for name, m := range map[string][]byte{
		"key": other.MAC("audit", []byte("data")), "purpose": k.MAC("audi", []byte("tdata")), "data": k.MAC("audit", []byte("datb")),
	} {
		if bytes.Equal(base, m) {
			t.Errorf("another %s gives the same MAC", name)
		}
	}
}

func TestDataKey_MACKeepsABoundedNumberOfSubkeys(t *testing.T) {
	t.Parallel()
	k := mustKey(t)
	first := map[string][]byte{}
	for i := range 2 * maxPurposes {
		p := fmt.Sprint(i)
		first[p] = k.MAC(p, []byte("data"))
	}
	for p, want := range first {
		if !bytes.Equal(k.MAC(p, []byte("data")), want) {
			t.Errorf("purpose %s gives another MAC the second time", p)
		}
	}
	if n := len(k.secret().macs); n != maxPurposes {
		t.Errorf("%d subkeys in memory", n)
	}
}

func TestRing_WrappedKeyIsBoundToKeyAndAAD(t *testing.T) {
	t.Parallel()
	ctx, aad := t.Context(), AAD("tenant", "ten_1")
	r := mustRing(t, mustKEK(t, "k1", 1))
	wrapped, k, err := r.NewDataKey(ctx, aad)
	if err != nil {
		t.Fatal(err)
	}
	sealed, _ := k.Seal([]byte("v"), nil)
	again, err := r.OpenDataKey(ctx, wrapped, aad)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := again.Open(sealed, nil); err != nil || string(got) != "v" {
		t.Fatalf("the unwrapped key opens nothing: %v", err)
	}
	if !bytes.Equal(k.MAC("p", nil), again.MAC("p", nil)) {
		t.Error("the unwrapped key makes other digests")
	}
	if _, err := r.OpenDataKey(ctx, wrapped, AAD("tenant", "ten_2")); !errors.Is(err, ErrOpen) {
		t.Errorf("wrong additional data: %v", err)
	}
	if _, err := mustRing(t, mustKEK(t, "k1", 2)).OpenDataKey(ctx, wrapped, aad); !errors.Is(err, ErrOpen) {
		t.Errorf("wrong key of the same id: %v", err)
	}
	if _, err := mustRing(t, mustKEK(t, "k2", 1)).OpenDataKey(ctx, wrapped, aad); !errors.Is(err, ErrUnknownKEK) {
		t.Errorf("unknown id: %v", err)
	}
	relabelled := bytes.Replace(wrapped, []byte("k1"), []byte("k2"), 1)
	if _, err := mustRing(t, mustKEK(t, "k2", 1)).OpenDataKey(ctx, relabelled, aad); !errors.Is(err, ErrOpen) {
		t.Errorf("relabelled: %v", err)
	}
	for n := range wrapped {
		if _, err := r.OpenDataKey(ctx, wrapped[:n], aad); err == nil {
			t.Errorf("unwraps at %d bytes", n)
		}
	}
}

func TestRing_Rotation(t *testing.T) {
	t.Parallel()
	ctx, aad := t.Context(), []byte("ten_1")
	old, next := mustKEK(t, "2025", 1), mustKEK(t, "2026", 2)
	wrapped, k, err := mustRing(t, old).NewDataKey(ctx, aad)
	if err != nil {
		t.Fatal(err)
	}
	sealed, _ := k.Seal([]byte("kept"), aad)

	both := mustRing(t, next, old)
	if _, err := both.OpenDataKey(ctx, wrapped, aad); err != nil {
		t.Fatalf("the old key does not unwrap beside the new one: %v", err)
	}
	rewrapped, changed, err := both.Rewrap(ctx, wrapped, aad)
	if err != nil || !changed {
		t.Fatalf("rewrap: %v, %v", changed, err)
	}
	same, changed, err := both.Rewrap(ctx, rewrapped, aad)
	if err != nil || changed || !bytes.Equal(same, rewrapped) {
		t.Errorf("a second rewrap changes: %v, %v", changed, err)
	}
	if _, _, err := both.Rewrap(ctx, wrapped, []byte("ten_2")); !errors.Is(err, ErrOpen) {
		t.Errorf("rewrap under wrong additional data: %v", err)
	}
	alone := mustRing(t, next)
	if _, err := alone.OpenDataKey(ctx, wrapped, aad); !errors.Is(err, ErrUnknownKEK) {
		t.Errorf("the dropped key still unwraps: %v", err)
	}
	k2, err := alone.OpenDataKey(ctx, rewrapped, aad)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := k2.Open(sealed, aad); err != nil || string(got) != "kept" {
		t.Errorf("after rotation: %q, %v", got, err)
	}
}

func TestConstructors_Refuse(t *testing.T) {
	t.Parallel()
	key := make([]byte, KeySize)
	for _, id := range []string{"", "A", "a b", "a/b", strings.Repeat("a", 65)} {
		if _, err := NewLocalKEK(id, key); err == nil {
			t.Errorf("id %q passes", id)
		}
	}
	for _, n := range []int{0, 16, 31, 33} {
		if _, err := NewLocalKEK("a", make([]byte, n)); err == nil {
			t.Errorf("a key of %d bytes passes", n)
		}
	}
	if _, err := NewRing(nil); err == nil {
		t.Error("a ring without a key passes")
	}
	if _, err := NewRing(mustKEK(t, "a", 1), nil); err == nil {
		t.Error("a ring with a missing key passes")
	}
	if _, err := NewRing(mustKEK(t, "a", 1), mustKEK(t, "a", 2)); err == nil {
		t.Error("an id used twice passes")
	}
}

type brokenKEK struct{ KEK }

func (brokenKEK) Unwrap(context.Context, []byte, []byte) ([]byte, error) { return []byte("short"), nil }

func TestRing_RefusesADataKeyOfTheWrongSize(t *testing.T) {
	t.Parallel()
	r := mustRing(t, brokenKEK{mustKEK(t, "k1", 1)})
	wrapped, _, err := r.NewDataKey(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.OpenDataKey(t.Context(), wrapped, nil); !errors.Is(err, ErrOpen) {
		t.Errorf("got %v", err)
	}
}

func TestSigner(t *testing.T) {
	t.Parallel()
	key := bytes.Repeat([]byte{9}, KeySize)
	s, same, other := NewSigner(DeriveSeed(key, "audit")), NewSigner(DeriveSeed(key, "audit")), NewSigner(DeriveSeed(key, "other"))
	if s.KeyID() != same.KeyID() || s.KeyID() == other.KeyID() || s.KeyID() != KeyID(s.Public()) {
		t.Fatal("a key id names its public key")
	}
	sig := s.Sign([]byte("m"))
	if !Verify(s.Public(), []byte("m"), sig) {
		t.Error("its own signature is refused")
	}
	if Verify(s.Public(), []byte("n"), sig) || Verify(other.Public(), []byte("m"), sig) || Verify(nil, []byte("m"), sig) || Verify(s.Public(), []byte("m"), nil) {
		t.Error("a wrong signature passes")
	}
	s.Public()[0] ^= 1
	if !Verify(s.Public(), []byte("m"), sig) {
		t.Error("Public hands out its own memory")
	}
}

// A key must not show under any verb, as a value, behind a pointer or within a
// struct, in JSON or in slog.
func TestKeys_NeverPrint(t *testing.T) {
	t.Parallel()
	secret := bytes.Repeat([]byte{0xA7}, KeySize)
	dk, err := newDataKey(secret)
	if err != nil {
		t.Fatal(err)
	}
	kek, signer := mustKEK(t, "k1", 0xA7), NewSigner(secret)
	hidden := struct {
		k  DataKey
		p  *DataKey
		s  *Signer
		sv Signer
		e  KEK
	}{*dk, dk, signer, *signer, kek}
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	for _, v := range []any{dk, *dk, kek, signer, *signer, hidden, &hidden, []any{dk, kek, signer}} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%o", "%b", "%08b"} {
			fmt.Fprintf(&out, verb+"\n", v)
		}
		j, _ := json.Marshal(v)
		out.Write(j)
		log.Info("m", "v", v)
	}
	text := strings.ToLower(out.String())
	for _, form := range []string{"a7a7", "167 167", "247 247", "10100111 10100111", "0xa7", string(secret[:4])} {
		if strings.Contains(text, form) {
			t.Errorf("the key shows as %q in:\n%s", form, text)
		}
	}
	if !strings.Contains(text, redacted) {
		t.Error("nothing says that something was left out")
	}
}

func TestErrors_HoldNoPlaintext(t *testing.T) {
	t.Parallel()
	k := mustKey(t)
	sealed, _ := k.Seal([]byte("hunter2"), nil)
	_, err := k.Open(sealed, []byte("aad-value"))
	if err == nil || strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "aad-value") {
		t.Errorf("got %v", err)
	}
}

// What an earlier build wrote must open for ever: stored rows hold these forms.
const (
	goldenSealed  = "017b5385b92bd065e0b53bf443ee55b4cfe15f0b8f646d3ddf16f0ec3a1877a5d43df7fa2663bfdffe9745d1d096"
	goldenWrapped = "01026b310e6877d55ef16eacdea9f5690dae72a3f42bdfd3a044d437f4cabae5a9ed4aa3d2b5d5cdaa8d69a1d00fd7914e9bc5971f43ca55bf82365ef16a3c0cdf7d520726fcdaef27677e61"
	goldenMAC     = "b0d1ba637e36ba002d3342ebe79bc8e74f3509e6f0e35f6638204135e7f4abf8"
)

func golden(t testing.TB) (k *DataKey, r *Ring, sealed, wrapped []byte) {
	t.Helper()
	k, err := newDataKey(bytes.Repeat([]byte{7}, KeySize))
	if err != nil {
		t.Fatal(err)
	}
	sealed, _ = hex.DecodeString(goldenSealed)
	wrapped, _ = hex.DecodeString(goldenWrapped)
	return k, mustRing(t, mustKEK(t, "k1", 1)), sealed, wrapped
}

func TestFormats_AreStable(t *testing.T) {
	t.Parallel()
	k, r, sealed, wrapped := golden(t)
	if got, err := k.Open(sealed, []byte("aad")); err != nil || string(got) != "plain" {
		t.Errorf("sealed: %q, %v", got, err)
	}
	if got := hex.EncodeToString(k.MAC("audit", []byte("data"))); got != goldenMAC {
		t.Errorf("MAC: %s", got)
	}
	again, err := r.OpenDataKey(t.Context(), wrapped, []byte("aad"))
	if err != nil || !bytes.Equal(again.MAC("p", nil), k.MAC("p", nil)) {
		t.Errorf("wrapped: %v", err)
	}
}

func FuzzOpen(f *testing.F) {
	k, _, good, _ := golden(f)
	f.Add(good, []byte("aad"))
	f.Add(good[:Overhead], []byte("aad"))
	f.Add([]byte{version}, []byte(nil))
	f.Add([]byte{}, []byte{})
	f.Fuzz(func(t *testing.T, sealed, aad []byte) {
		plain, err := k.Open(sealed, aad)
		if (err == nil) != (bytes.Equal(sealed, good) && bytes.Equal(aad, []byte("aad"))) {
			t.Fatalf("%x: opens to %q, %v", sealed, plain, err)
		}
		if err != nil && plain != nil {
			t.Fatal("an error came with a plaintext")
		}
	})
}

func FuzzOpenDataKey(f *testing.F) {
	_, r, _, good := golden(f)
	f.Add(good)
	f.Add(good[:4])
	f.Add([]byte{version, 255})
	f.Add([]byte{version, 0})
	f.Fuzz(func(t *testing.T, wrapped []byte) {
		if k, err := r.OpenDataKey(t.Context(), wrapped, []byte("aad")); (err == nil) != bytes.Equal(wrapped, good) || (err != nil && k != nil) {
			t.Fatalf("%x: %v", wrapped, err)
		}
	})
}

func BenchmarkSeal(b *testing.B) {
	k := mustKey(b)
	plain, aad := make([]byte, 500), AAD("ten_1", "audit", "aud_1", "details")
	for b.Loop() {
		if _, err := k.Seal(plain, aad); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkMAC(b *testing.B) {
	k, data := mustKey(b), make([]byte, 500)
	for b.Loop() {
		k.MAC("audit", data)
	}
}

package main

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/bulkhead-mcp/bulkhead/internal/catalog"
	"github.com/bulkhead-mcp/bulkhead/internal/config"
	"github.com/bulkhead-mcp/bulkhead/internal/demo"
	"github.com/bulkhead-mcp/bulkhead/internal/fault"
	"github.com/bulkhead-mcp/bulkhead/internal/tenant"
)

// version is what this build calls itself toward servers.
const version = "0.1.0"

// demoFile is demo.json in the data directory, mode 0600.
type demoFile struct {
	URL         string `json:"url"`
	TenantID    string `json:"tenantId"`
	AdminKey    string `json:"adminKey"`
	ServiceKey  string `json:"serviceKey"`
	ApproverKey string `json:"approverKey"`
	AuditorKey  string `json:"auditorKey"`
	OperatorKey string `json:"operatorKey"`
}

const (
	demoFileName     = "demo.json"
	operatorFileName = "operator.key"
	demoAddressName  = "demo-calendar.address"
)

// operatorKey returns the configured credential of the operator; development
// mode makes one and keeps it in the data directory.
func operatorKey(cfg *config.Config) (string, error) {
	if !cfg.Development || cfg.OperatorKey != "" {
		return string(cfg.OperatorKey), nil
	}
	path := filepath.Join(cfg.DataDir, operatorFileName)
	raw, err := os.ReadFile(path)
	if err == nil {
		return strings.TrimSpace(string(raw)), nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	var random [32]byte
	rand.Read(random[:]) //nolint:errcheck // crypto/rand.Read never fails since Go 1.24
	key := "bho_" + base64.RawURLEncoding.EncodeToString(random[:])
	return key, os.WriteFile(path, []byte(key+"\n"), 0o600)
}

// development keeps the demo server running beside the service, sees to the demo
// tenant, and tells the person at the terminal how to go on.
func (p *parts) development(ctx context.Context, url string, stdout io.Writer) error {
	child, err := p.startDemoServer(ctx)
	if err != nil {
		return fault.Wrap(err, "start the demo calendar")
	}
	defer child.close() //nolint:errcheck // it ends with its standard input
	file, fresh, err := p.demoTenant(ctx, url)
	if err == nil {
		err = p.demoServer(ctx, file.AdminKey, child.demoReady)
	}
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fault.Wrap(err, "prepare the demo tenant")
	}
	p.announce(stdout, file, fresh)
	select {
	case <-ctx.Done():
		return nil
	case <-child.exited:
		return errors.New("the demo calendar ended by itself")
	case <-p.stores.lost:
		return errors.New("the embedded PostgreSQL ended by itself")
	}
}

// startDemoServer takes the address of the last time, so that the registration
// stays true across restarts; another one when that is taken.
func (p *parts) startDemoServer(ctx context.Context) (*demoChild, error) {
	path := filepath.Join(p.cfg.DataDir, demoAddressName)
	if raw, err := os.ReadFile(path); err == nil {
		if child, err := startDemo(ctx, strings.TrimSpace(string(raw))); err == nil {
			return child, nil
		}
	}
	child, err := startDemo(ctx, "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(child.URL)
	if err == nil {
		err = os.WriteFile(path, []byte(u.Host+"\n"), 0o600)
	}
	if err != nil {
		return nil, errors.Join(err, child.close())
	}
	return child, nil
}

// demoTenant returns the demo tenant's keys; fresh ones are written to demo.json.
func (p *parts) demoTenant(ctx context.Context, url string) (file demoFile, fresh bool, err error) {
	path := filepath.Join(p.cfg.DataDir, demoFileName)
	if raw, err := os.ReadFile(path); err == nil && json.Unmarshal(raw, &file) == nil {
		if _, err := p.admin(ctx, file.AdminKey); err == nil {
			if file.URL == url {
				return file, false, nil
			}
			file.URL = url
			return file, false, writeDemo(path, file)
		}
	}
	file = demoFile{URL: url}
	if file.OperatorKey, err = operatorKey(p.cfg); err != nil {
		return file, false, err
	}
	t, admin, err := p.tenants.CreateTenant(ctx, "Demo", "")
	if err != nil {
		return file, false, err
	}
	file.TenantID, file.AdminKey = t.ID.String(), admin.Secret
	who, err := p.admin(ctx, admin.Secret)
	if err != nil {
		return file, false, err
	}
	for _, k := range []struct {
		role tenant.Role
		name string
		dst  *string
	}{
		{tenant.RoleService, "demo frontend", &file.ServiceKey},
		{tenant.RoleApprover, "demo approver", &file.ApproverKey},
		{tenant.RoleAuditor, "demo auditor", &file.AuditorKey},
	} {
		made, err := p.tenants.CreateKey(ctx, who, tenant.KeySpec{DisplayName: k.name, Role: k.role}, "")
		if err != nil {
			return file, false, err
		}
		*k.dst = made.Secret
	}
	return file, true, writeDemo(path, file)
}

// writeDemo replaces the file at once, so that a reader never sees half of it.
func writeDemo(path string, file demoFile) error {
	raw, err := json.MarshalIndent(file, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", append(raw, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func (p *parts) admin(ctx context.Context, key string) (tenant.Principal, error) {
	return p.tenants.Authenticate(ctx, key, tenant.OnBehalf{}, netip.MustParseAddr("127.0.0.1"))
}

// demoServer registers the demo calendar and reviews it: its contract pins the
// definitions that it offers now.
func (p *parts) demoServer(ctx context.Context, adminKey string, at demoReady) error {
	who, err := p.admin(ctx, adminKey)
	if err != nil {
		return err
	}
	v, err := p.catalog.GetServer(ctx, who, demo.ServerName)
	switch {
	case fault.Is(err, fault.NotFound):
		v, err = p.catalog.CreateServer(ctx, who, catalog.ServerSpec{Name: demo.ServerName, DisplayName: "Demo calendar", URL: at.URL}, "")
	case err == nil && v.URL != at.URL:
		v, err = p.catalog.UpdateServer(ctx, who, v.ID, catalog.ServerUpdate{URL: &at.URL})
	case err == nil && v.ActiveContract > 0:
		return nil
	}
	if err != nil {
		return err
	}
	if _, err := p.catalog.ProbeServer(ctx, who, v.ID); err != nil {
		return err
	}
	rev, err := p.catalog.Definitions(ctx, who, v.ID, catalog.Tool, false)
	if err != nil {
		return err
	}
	digests := map[string]string{}
	for _, d := range rev.Definitions {
		digests[d.Name] = d.Digest
	}
	r, err := p.authz.Create(ctx, who, v.ID, demo.Contract(at.Origin, at.URL, digests), "")
	if err != nil {
		return err
	}
	_, err = p.authz.Activate(ctx, who, v.ID, r.Revision)
	return err
}

func (p *parts) announce(stdout io.Writer, file demoFile, fresh bool) {
	path := filepath.Join(p.cfg.DataDir, demoFileName)
	if fresh {
		fmt.Fprintf(stdout, "\nBulkhead is serving at %s (development mode: everything is private to this machine).\n"+
			"The demo tenant's keys, shown once; they are kept in %s:\n"+
			"  admin     %s\n  service   %s\n  approver  %s\n  auditor   %s\n  operator  %s\n\n",
			file.URL, path, file.AdminKey, file.ServiceKey, file.ApproverKey, file.AuditorKey, file.OperatorKey)
		return
	}
	fmt.Fprintf(stdout, "\nBulkhead is serving at %s (development mode); the demo tenant's keys are in %s.\n\n", file.URL, path)
}

package contract

// readRetries are the further attempts of a resource read or a prompt get that may
// have been sent: asking for either again does no harm.
const readRetries = 2

// reads are the terms of what only reads, before its own members are looked at.
func reads(c *Contract) Terms {
	return Terms{Definition: DefinitionAny, Effect: EffectRead, Retry: Retry{Max: readRetries}, Timeout: c.Limits.Timeout}
}

func (r *reader) resources(c *Contract, top object) {
	r.each(top, "resources", []string{"uri", "consent", "subjects"}, func(o object) {
		v, at, ok := o.need("uri")
		if !ok {
			return
		}
		uri, ok := r.printable(at, v, maxURI)
		if !ok {
			return
		}
		res, rule := newResource(uri)
		if rule != "" {
			r.fail(at, "%s", rule)
			return
		}
		for _, other := range c.Resources {
			if other.URI == uri {
				r.fail(at, "stands in the list twice")
				return
			}
		}
		res.Terms = reads(c)
		r.consent(&res.Terms, o)
		r.subjects(&res.Terms, o)
		c.Resources = append(c.Resources, res)
	})
}

func (r *reader) prompts(c *Contract, top object) {
	r.each(top, "prompts", []string{"name", "definition", "consent", "subjects"}, func(o object) {
		v, at, ok := o.need("name")
		if !ok {
			return
		}
		p := &Prompt{Terms: reads(c)}
		if p.Name, ok = r.printable(at, v, maxWord); !ok {
			return
		}
		if _, twice := c.Prompt(p.Name); twice {
			r.fail(at, "stands in the list twice")
			return
		}
		if v, path, ok := o.get("definition"); ok {
			p.Definition = r.definition(path, v)
		}
		r.consent(&p.Terms, o)
		r.subjects(&p.Terms, o)
		c.Prompts = append(c.Prompts, p)
	})
}

// each reads the objects of an optional list.
func (r *reader) each(top object, name string, known []string, read func(o object)) {
	v, path, ok := top.get(name)
	if !ok {
		return
	}
	l, ok := r.list(path, v, 0, maxPatterns)
	if !ok {
		return
	}
	for i, v := range l {
		if o, ok := r.object(element(path, i), v, known...); ok {
			read(o)
		}
	}
}

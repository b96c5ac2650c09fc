# The commands a user and CI know. Everything they need, they install (setup.sh).
#
#   make demo    boots two guests and shows both ways of capture side by side
#   make demo-switch   guests, a container and an old program on one switch, beside vde_switch
#   make demo-sandbox  a program in a sandbox connects to a host that it should not
#   make demo-record   records a busy wire, kills the recorder, and finds a conversation again
#   make test    all tests, real guests included
#   make bench   ours and the peers, in one table (ROWS="handoff fanout …" selects)
#   make build   vnplugd, vnplug-web, libvnplug, and the static vnplug for guests
#   make query   vnplug-query, which answers `vnplug query` (takes longer than all the rest)
#   make install PREFIX=/usr/local      what was built; as root it needs no Rust
#   make package   .deb, .rpm, a static tarball, an OCI image, a Python wheel: target/packages
#   make site    the documentation as a site: target/site/html

PREFIX ?= /usr/local
TARGET := $(or $(CARGO_TARGET_DIR),target)
STATIC := x86_64-unknown-linux-gnu
ARM64 := aarch64-unknown-linux-gnu
GUEST_BIN := target/guest/bin/vnplug
# What is made of what cargo built: the library with versions, man pages.
PRODUCED := target/products
# Pages and completions of the programs that are built: again when one more is.
WRITE_MANUAL = dist/manual $(PRODUCED)/manual $(GUEST_BIN) \
	$(addprefix $(TARGET)/release/,vnplugd vnplug-web vnplug-metrics vnplug-query)
# Lets User-mode Linux run on processors with AMX; `vnplug attach uml` finds it in ../lib/vnplug.
UML_PRELOAD := target/guest/lib/vnplug/libvnplug-uml-xstate.so
# Tests and the demo make network namespaces and boot guests; they ask for root only to run.
AS_ROOT := ./.ci/as-root
# The Python package and what its tests need are installed here, from PyPI.
VENV := target/venv

# What is installed; the bench builds its own programs with it, in one go, so that nothing is compiled
# twice for other features.
PRODUCTS := -p vnplugd -p libvnplug -p vnplug-pcap -p vnplug-pfring -p vnplug-vdeplug -p vnplug-web

# What the demo runs, and nothing else: it is the first that a user builds.
DEMO := -p vnplugd -p vnplug-pcap -p vnplug-e2e

.PHONY: all setup-build setup-demo setup-switch setup-sandbox setup-package setup build guest guest-arm64 query \
	demo demo-switch demo-record demo-sandbox \
	test test-models test-python test-packages bench install package site clean

all: build

setup-build:
	./setup.sh build

setup-demo:
	./setup.sh demo

setup-switch:
	./setup.sh switch

setup-sandbox:
	./setup.sh sandbox

setup-package:
	./setup.sh package

setup:
	./setup.sh test

guest: setup-build $(UML_PRELOAD)
	RUSTFLAGS="-C target-feature=+crt-static" cargo build --locked --release \
		--target $(STATIC) -p vnplug-cli
	install -s -D -m 755 $(TARGET)/$(STATIC)/release/vnplug $(GUEST_BIN)

# The same for guests with an arm64 processor. It needs `rustup target add $(ARM64)`, and gcc-aarch64-linux-gnu.
guest-arm64:
	CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc RUSTFLAGS="-C target-feature=+crt-static" \
		CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
		cargo build --locked --release --target $(ARM64) -p vnplug-cli
	install -D -m 755 $(TARGET)/$(ARM64)/release/vnplug target/guest-arm64/bin/vnplug
	aarch64-linux-gnu-strip target/guest-arm64/bin/vnplug

$(UML_PRELOAD): cli/uml-xstate.c | setup-build
	install -d $(@D)
	$(CC) -O2 -shared -fPIC -o $@ $<

# The library gets its name and the versions of its symbols here: Rust's compiler gives neither, and its tests
# load what it made.
build: guest
	cargo build --locked --release $(PRODUCTS)
	install -d $(PRODUCED)
	$(CC) -shared -o $(PRODUCED)/libvnplug.so.0 -Wl,-soname,libvnplug.so.0 \
		-Wl,--version-script=guest/vnplug.map -Wl,--gc-sections,--no-undefined,-z,relro,-z,now \
		-Wl,--whole-archive $(TARGET)/release/libvnplug.a -Wl,--no-whole-archive -lgcc_s -lc
	$(WRITE_MANUAL)
	@echo "built: $(TARGET)/release/vnplugd, $(TARGET)/release/libvnplug.so, $(GUEST_BIN)"

query: setup-build
	cargo build --locked --release -p vnplug-query
	test ! -x $(GUEST_BIN) || $(WRITE_MANUAL)
	@echo "built: $(TARGET)/release/vnplug-query"

demo: setup-demo guest
	./e2e/setup-guest-kernel.sh
	cargo build --locked --release $(DEMO)
	$(AS_ROOT) $(TARGET)/release/demo

demo-switch: setup-switch guest
	./e2e/setup-guest-kernel.sh
	cargo build --locked --release $(DEMO)
	$(AS_ROOT) $(TARGET)/release/demo-switch

demo-record: setup-demo guest
	cargo build --locked --release $(DEMO) -p vnplug-web
	$(AS_ROOT) $(TARGET)/release/demo-record

demo-sandbox: setup-sandbox guest
	cargo build --locked --release -p vnplugd -p vnplug-e2e
	$(AS_ROOT) $(TARGET)/release/demo-sandbox

test: setup guest
	./e2e/setup-guest-kernel.sh
	./e2e/get-prometheus.sh
	$(AS_ROOT) sh -c 'mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf'
	cargo build --locked --workspace
	./.ci/run-tests $(TEST_ARGS); tests=$$?; \
	$(MAKE) test-models test-python && exit $$tests

# Built apart, for the dependencies of loom.
test-models: setup
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom \
		cargo test --locked -p vnplug-ring --test kick_model --test news_model --test posted_model

test-python: setup
	cargo build --locked --workspace --bin vnplugd
	test -x $(VENV)/bin/pip || python3 -m venv $(VENV)
	$(VENV)/bin/pip install -q 'numpy>=2,<3' 'mypy>=1.18,<3'
	$(VENV)/bin/pip install -q ./python
	cd python/tests && ../../.ci/run-test ../../$(VENV)/bin/python -B -m unittest

# Both sides of every row run before other work, so that it does not decide. Not in a real-time class:
# the kernel pauses a CPU that is full of such work for 50 ms in each second.
bench: setup guest
	./e2e/setup-guest-kernel.sh
	$(AS_ROOT) sh -c 'mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf'
	./bench/get-ovs.sh || echo "bench: without Open vSwitch; the rows switch-vhost will fail" >&2
	./bench/get-web.sh || echo "bench: without nginx and httperf; the row twin-web will fail" >&2
	./bench/get-sandlock.sh || echo "bench: without Sandlock; the rows sandbox will fail" >&2
	cargo build --locked --release $(PRODUCTS) -p vnplug-e2e -p vnplug-bench -p vnplug-sandbox
	$(AS_ROOT) nice -n -20 $(TARGET)/release/vnplug-bench $(ROWS)

# Builds nothing: root has no Rust where rustup put it into a user's home. dist/files says what goes where.
install:
	@PREFIX=$(PREFIX) dist/install

# Packages of what is built: target/packages. `make package KINDS="deb tar"` makes some of them. The wheel is compiled here, and by a
# program of PyPI's.
package: setup-package build query
	dist/package $(or $(KINDS),deb rpm tar iso image wheel)

# Installs them into a fresh Debian, runs, upgrades and removes them there; then types what the pages say.
test-packages: package
	./.ci/packages
	./.ci/type-commands

# mdBook takes some minutes to compile, once. Without optimisation: half of that, and it makes the site in seconds all the same.
site: setup-build
	test -x target/mdbook/bin/mdbook || \
		CARGO_PROFILE_DEV_DEBUG=0 cargo install --debug --locked --root target/mdbook --version 0.5.4 --no-default-features --features search mdbook
	MDBOOK=target/mdbook/bin/mdbook dist/site

clean:
	cargo clean

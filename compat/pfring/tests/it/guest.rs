//! The same programs in a guest: User-mode Linux with the agent, packets of the host's sources.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::support::{Library, compile, number};
use vnplug::{Client, Grant, VmKind, VmSpec};
use vnplug_e2e::daemon::{Daemon, guest_program};
use vnplug_e2e::{Guest, Image, Lab, Uml, UmlConfig};
use vnplug_testing::{PATIENCE, until};

/// A guest whose agent serves the daemon's sources; the channel ends with the second value.
fn boot(lab: &Lab, daemon: &Daemon, image: Image) -> (Guest, UnixStream) {
    let grant = Grant {
        source: "*".into(),
        filter: String::new(),
    };
    let spec = VmSpec {
        name: "uml".into(),
        kind: VmKind::Uml,
        pool_bytes: 64 << 20,
        vectors: 0,
        allow: vec![grant],
        owner: 7,
        groups: Vec::new(),
        stays_for: None,
    };
    let mut client = Client::connect_to(&daemon.socket()).unwrap();
    let ready = client.attach_vm(spec).unwrap();
    let (channel, theirs) = UnixStream::pair().unwrap();
    client.adopt("uml", channel.as_fd()).unwrap();
    let config = UmlConfig {
        pool: Some(ready.pool_path.into()),
        lines: vec![(0, OwnedFd::from(theirs))],
        kernel_args: vec!["vnplug=ttyS0".into()],
        image: image.file(guest_program().unwrap(), "/bin/vnplug", 0o755),
        ..UmlConfig::default()
    };
    let guest = Uml::boot(lab, config).unwrap_or_else(|error| panic!("{error}"));
    (guest, channel)
}

fn run(guest: &Guest, command: &str) -> String {
    // The program looks for its library where the host had it, which the guest's /tmp hides.
    let command = &format!("LD_LIBRARY_PATH=/lib {command} 2>&1");
    let output = guest.run(command, PATIENCE).unwrap();
    assert_eq!(output.status, 0, "{command}: {}", output.text());
    output.text()
}

#[test]
fn programs_read_the_hosts_packets_in_a_guest() {
    let lab = Lab::new().unwrap();
    let sources = [
        "g=gen,pps=5000,flows=12,protocols=udp4+tcp4+udp6,size=100-200,queues=2",
        "end=gen,pps=5000,size=100",
        "fin=gen,count=1000",
    ];
    let mut args: Vec<&str> = sources
        .iter()
        .flat_map(|source| ["--source", source])
        .collect();
    args.extend(["--allow-send", "vm:uml=end"]);
    let daemon = Daemon::start(&lab, None, &args).unwrap();
    let shared = compile(lab.dir(), "count", Library::Shared);
    let fixed = compile(lab.dir(), "calls", Library::Static);
    let rules = compile(lab.dir(), "rules", Library::Static);
    let send = compile(lab.dir(), "send", Library::Static);
    let library = lab.dir().join("libpfring.so");
    let image = Image::default()
        .program(shared)
        .program(fixed)
        .program(rules)
        .program(send)
        .file(library, "/lib/libpfring.so", 0o755);
    let (guest, _channel) = boot(&lab, &daemon, image);
    let _agent = guest.spawn("exec vnplug agent 2>&1").unwrap();
    let list = || guest.run("vnplug list", PATIENCE).unwrap();
    until("there is an agent", list, |list| list.status == 0);

    for how in ["loop", "burst", "copy"] {
        let text = run(
            &guest,
            &format!("count -i host:g -n 2000 -r {how} -f 'not tcp' -w 32"),
        );
        assert_eq!(
            (number(&text, "packets"), number(&text, "bad")),
            (2000, 0),
            "{text}"
        );
    }
    let text = run(&guest, "count -i host:g@1 -n 500 -m -l 80");
    assert_eq!(
        (number(&text, "packets"), number(&text, "captured")),
        (500, 40_000),
        "{text}"
    );
    let text = run(&guest, "count -i host:g -n 500 -m -c 5 -H 1");
    assert_eq!(number(&text, "packets"), 500, "{text}");
    assert!(run(&guest, "calls host:end host:fin").ends_with("all calls"));
    assert!(run(&guest, "rules host:g").ends_with("rules"));
    let text = run(&guest, "send -i host:end -n 2000");
    assert_eq!(number(&text, "sent"), 2000, "{text}");
    let text = run(&guest, "send -i host:g -n 1");
    assert!(text.starts_with("mode -7: Permission denied"), "{text}");
    drop(guest);
    daemon.audit();
}

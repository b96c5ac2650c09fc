//! Files and flags, good and bad.

use clap::CommandFactory;
use vnplug_testing::Pages;

use super::*;

#[test]
fn every_option_stands_in_a_page() {
    let command = Arguments::command();
    let options = command.get_arguments().filter_map(|it| it.get_long());
    let lacking = Pages::read().lack("vnplugd", options);
    assert!(lacking.is_empty(), "docs/ lacks {lacking:#?}");
}

fn load(text: &str, flags: &[&str]) -> Result<Config, String> {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let name = format!("vnplugd-config-{}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, text).unwrap();
    let path_text = path.to_str().unwrap();
    let arguments = [&["vnplugd", "--config", path_text], flags].concat();
    let config = Config::load(Arguments::try_parse_from(arguments).unwrap());
    std::fs::remove_file(&path).unwrap();
    config
}

#[test]
fn a_file_and_flags_add_up() {
    let text = "
        socket = '/tmp/s'
        ring_bytes = '1MiB'
        wake_us = 20
        jit = 'off'
        jit_bytes = '1MiB'
        [[source]]
        name = 'eth1'
        queues = 2
        [[allow]]
        vm = 'probe'
        source = 'eth1'
        filter = 'icmp'
        send = true
    ";
    let flags = ["--source", "lab=gen", "--allow", "uid:1000=lab:port 53"];
    let flags = [&flags[..], &["--allow-send", "uid:1000=lab"]].concat();
    let config = load(text, &flags).unwrap();
    let senders = [
        (Peer::Vm("probe".into()), "eth1".to_owned()),
        (Peer::User(1000), "lab".to_owned()),
    ];
    let sending = |(whom, source)| Sending {
        whom,
        source,
        terms: String::new(),
    };
    assert_eq!(config.senders, senders.map(sending));
    assert_eq!((config.ring_bytes, config.sources.len()), (1 << 20, 2));
    assert_eq!((config.jit, config.jit_bytes), (OnOff::Off, 1 << 20));
    assert_eq!(config.wake_us, Some(20));
    let config_on = load(text, &["--jit", "on", "--wake-us", "0"]).unwrap();
    assert_eq!(config_on.wake_us, Some(0));
    assert_eq!(config_on.jit, OnOff::On);
    assert_eq!(config.state_dir, Path::new("/tmp"));
    assert_eq!(config.vms[0].1.filter, "icmp");
    assert_eq!(
        (config.users[0].0, config.users[0].1.filter.as_str()),
        (1000, "port 53")
    );
}

#[test]
fn who_may_join_is_said_with_settings_of_the_port() {
    let text = "
        [[join]]
        vm = 'probe'
        switch = 'lan0'
        vlan = 10
        mac = ['02:00:00:00:00:01', '02:00:00:00:00:02']
    ";
    let flags = ["--allow-join", "uid:1000=lan0,vlan=7,mac=02:00:00:00:00:03"];
    let flags = [&flags[..], &["--allow-join", "vm:b=lan1"]].concat();
    let config = load(text, &flags).unwrap();
    let join = |whom, switch: &str, settings: &str| Join {
        whom,
        switch: switch.into(),
        settings: settings.into(),
    };
    let macs = "lock=02:00:00:00:00:01+02:00:00:00:00:02,vlan=10";
    assert_eq!(
        config.joiners,
        [
            join(Peer::Vm("probe".into()), "lan0", macs),
            join(Peer::User(1000), "lan0", "vlan=7,lock=02:00:00:00:00:03"),
            join(Peer::Vm("b".into()), "lan1", ""),
        ]
    );
    let error = load("[[join]]\nswitch = 'a'", &[]).unwrap_err();
    assert!(error.contains("either a vm or a uid"), "{error}");
}

#[test]
fn lists_are_what_the_command_line_joins_by_plus() {
    let text = "
        [[source]]
        name = 'lab'
        kind = 'gen'
        protocols = ['udp4', 'tcp4']
        cpus = [0, 1]
    ";
    let config = load(text, &[]).unwrap();
    let flag = "lab=gen,protocols=udp4+tcp4,cpus=0+1";
    assert_eq!(config.sources[0], flag.parse().unwrap());
    assert!(
        config.sources[0]
            .open(&crate::spec::Means::default())
            .is_ok()
    );
}

#[test]
fn a_switch_is_a_source_of_its_kind() {
    let text = "
        [[switch]]
        name = 'lan0'
        vde = '/tmp/lan0.ctl'
        hub = true
        static = ['02:00:00:00:00:01@3/10', '02:00:00:00:00:02@3']
        default = { isolated = true }
        port.3 = { vlan = 10, lock = 'first' }
        [switch.port.4]
        trunk = '1-9'
    ";
    let config = load(text, &["--switch", "lan1", "--switch", "lan2,hub=yes"]).unwrap();
    let statics = "static=02:00:00:00:00:01@3/10+02:00:00:00:00:02@3,default.isolated=yes";
    let ports = "port.3.vlan=10,port.3.lock=first,port.4.trunk=1-9";
    let specs = [
        &format!("lan0=switch:/tmp/lan0.ctl,hub=yes,{statics},{ports}"),
        "lan1=switch",
        "lan2=switch,hub=yes",
    ];
    let specs = specs.map(|text| text.parse::<SourceSpec>().unwrap());
    assert_eq!(config.sources, specs);
    for (flag, part) in [("lan0=gen", "NAME,OPTION"), ("lan0,hub", "OPTION=VALUE")] {
        let error = load("", &["--switch", flag]).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn what_is_wrong_is_named() {
    for (text, part) in [
        ("sokket = 'x'", "sokket"),
        ("jit = 'maybe'", "jit"),
        ("ring_bytes = 'big'", "ring_bytes"),
        ("[[source]]\nkind = 'gen'", "needs a name"),
        ("[[switch]]\nhub = true", "needs a name"),
        ("[[switch]]\nname = 'a'\nkind = 'gen'", "no kind"),
        ("[[allow]]\nsource = 'x'", "either a vm or a uid"),
        ("[[source]]\nname='a'\n[[source]]\nname='a'", "two sources"),
        ("socket_mode = 660", "0o660"),
        ("max_ports = 0", "at least 1"),
        ("ring_bytes = '2GiB'", "max_ring_bytes"),
    ] {
        let error = load(text, &[]).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
    assert!(
        load("", &["--allow", "probe"])
            .unwrap_err()
            .contains("no grant")
    );
}

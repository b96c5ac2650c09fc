//! `vnplug sandbox --net`, `--offline` and `--record`: the program's own wire, calls and packets together.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use vnplug::{Next, Port};
use vnplug_e2e::asking::{self, Asking, Reply};
use vnplug_e2e::daemon::{Daemon, counted, program, value};
use vnplug_e2e::raw::children;
use vnplug_e2e::secure::{BROWSE_BY_QUIC, FETCH_BY_QUIC, PAGE, quic_server};
use vnplug_e2e::station::{Running, Station};
use vnplug_e2e::user::{USER, open_to_all};
use vnplug_e2e::{Lab, secure};
use vnplug_testing::eventually;

const WIRE: &str = "lan0,address=203.0.113.9/24,mac=02:00:00:00:71:09";
/// The kernel looks for routers and groups of IPv6 by itself.
const OWN: &str = "ether host 02:00:00:00:71:09 and (ip or arp)";

/// A machine on the switch that greets whoever comes.
fn greeter(lab: &Lab, daemon: &Daemon) -> Station {
    let station = Station::by_nic(lab, daemon, "lan0", "203.0.113.2", &[]).unwrap();
    let at: SocketAddr = "203.0.113.2:7000".parse().unwrap();
    let listener = station
        .netns
        .enter(|| TcpListener::bind(at))
        .unwrap()
        .unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.unwrap().write_all(b"good morning\n");
        }
    });
    station
}

fn sandbox(daemon: &Daemon, options: &[&str], words: &[&str]) -> Command {
    let mut command = daemon.command().unwrap();
    command
        // Where no program can make one either.
        .env("XDG_CONFIG_HOME", "/proc/nonexistent")
        .arg("sandbox");
    command
        .args(options)
        .arg("--")
        .args(words)
        .stdin(Stdio::null());
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

fn frames(at: &mut Port) -> usize {
    thread::sleep(Duration::from_millis(50));
    let mut count = 0;
    while let Next::Packet(_) = at.next().unwrap() {
        count += 1;
    }
    count
}

const GREET: &str = "exec 3<>/dev/tcp/203.0.113.2/7000; cat <&3";

#[test]
fn what_is_denied_at_the_call_has_no_frame_and_what_is_allowed_passes_the_fence() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let _station = greeter(&lab, &daemon);
    let mut at_switch = daemon.port("host:lan0").filter(OWN).open().unwrap();
    let run = |options: &[&str]| {
        let output = sandbox(
            &daemon,
            &[&["--net", WIRE], options].concat(),
            &["bash", "-c", GREET],
        )
        .output();
        said(&output.unwrap())
    };
    let denied = run(&["--default", "deny"]);
    assert!(
        !denied.contains("good morning") && denied.contains("(0 of allowed calls"),
        "{denied}"
    );
    assert_eq!(frames(&mut at_switch), 0, "{denied}");
    let allowed = run(&["--default", "allow"]);
    assert!(
        allowed.contains("good morning") && !allowed.contains("(0 of allowed calls"),
        "{allowed}"
    );
    assert!(frames(&mut at_switch) > 0, "{allowed}");
    // With the fence open the calls hold by themselves.
    let open = format!("{WIRE},fence=off");
    let words = ["bash", "-c", GREET];
    let output = sandbox(&daemon, &["--net", &open, "--default", "deny"], &words)
        .output()
        .unwrap();
    assert!(!said(&output).contains("good morning"), "{}", said(&output));
    assert_eq!(frames(&mut at_switch), 0, "{}", said(&output));
    daemon.audit();
}

#[test]
fn an_ordinary_user_has_a_wire_and_a_recording_of_it() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let [join, see] = ["lan0", "lan0/port9"].map(|what| format!("uid:{USER}={what}"));
    let to = lab.dir().join("recording");
    std::fs::create_dir(&to).unwrap();
    std::os::unix::fs::chown(&to, Some(USER), None).unwrap();
    let arguments = [
        "--config",
        &config,
        "--switch",
        "lan0",
        "--allow-join",
        &join,
        "--allow",
        &see,
    ];
    let daemon = Daemon::start(&lab, None, &arguments).unwrap();
    let wire = WIRE.replace("lan0", "lan0/port9");
    let _station = greeter(&lab, &daemon);
    let to = to.display().to_string();
    let options = ["--net", &wire, "--default", "allow", "--record", &to];
    let mut command = sandbox(&daemon, &options, &["bash", "-c", GREET]);
    std::os::unix::process::CommandExt::uid(&mut command, USER);
    let output = command.output().unwrap();
    let text = said(&output);
    assert!(
        text.contains("good morning") && text.contains("its traffic is in"),
        "{text}"
    );
    let found = lab.dir().join("found.pcap");
    let [filter, file] = ["tcp and host 203.0.113.2", &found.display().to_string()];
    let (code, told) = daemon.vnplug(&["extract", &to, "--filter", filter, "-w", file]);
    assert_eq!(code, Some(0), "{told}");
    // The file's header, and at least a handshake and a greeting.
    assert!(
        std::fs::metadata(&found).unwrap().len() > 400,
        "{text}{told}"
    );
}

/// A server on the station that gives its address to every name below `test`.
fn name_server(lab: &Lab, station: &Station) -> Running {
    let mut server = station.netns.command("dnsmasq");
    server.args([
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--no-resolv",
        "--no-hosts",
        "--bind-interfaces",
        "--listen-address=203.0.113.2",
        "--address=/test/203.0.113.2",
        "--pid-file=",
    ]);
    let running = Running::start(server, lab, "dnsmasq").unwrap();
    let listens = || station.netns.exec(&["ss", "-lnu"]).unwrap();
    eventually("the server is there", || {
        listens().contains("203.0.113.2:53")
    });
    running
}

#[test]
fn names_are_judged_and_then_asked_of_the_server_on_the_wire() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let station = greeter(&lab, &daemon);
    let _server = name_server(&lab, &station);
    let rules = lab.dir().join("rules.toml");
    let allow = "default = 'deny'\n[[rule]]\nsay = 'allow'\nto = 'greeter.test'\n";
    std::fs::write(&rules, allow).unwrap();
    let questions = format!("{OWN} and udp port 53");
    let mut at_switch = daemon.port("host:lan0").filter(&questions).open().unwrap();
    let wire = format!("{WIRE},dns=203.0.113.2");
    let rules = rules.display().to_string();
    let options = ["--net", &wire, "--profile", &rules, "--ask", "none"];
    let greeted = |name: &str| {
        let script = GREET.replace("203.0.113.2", name);
        let mut command = sandbox(&daemon, &options, &["bash", "-c", &script]);
        said(&command.output().unwrap())
    };
    // The same address, but nobody allowed the name: no question for it leaves.
    let refused = greeted("other.test");
    assert!(!refused.contains("good morning"), "{refused}");
    assert_eq!(frames(&mut at_switch), 0, "{refused}");
    let told = greeted("greeter.test");
    assert!(told.contains("good morning"), "{told}");
    assert!(frames(&mut at_switch) > 0, "{told}");
    daemon.audit();
}

#[test]
fn whoever_looks_up_many_names_takes_no_address_away_from_a_name_of_another_rule() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let station = greeter(&lab, &daemon);
    let _server = name_server(&lab, &station);
    let rules = lab.dir().join("rules.toml").display().to_string();
    let script = "import socket\n\
        socket.gethostbyname('shop.test')\n\
        for number in range(100): socket.gethostbyname(f'n{number}.flood.test')\n\
        print(socket.create_connection(('203.0.113.2', 7000), 3).recv(99))\n";
    let greeted = |parts: [&str; 2]| {
        let rule = |to| format!("[[rule]]\nsay = 'allow'\nto = {to}\n");
        let text = parts.map(rule).concat();
        std::fs::write(&rules, format!("default = 'deny'\n{text}")).unwrap();
        let wire = format!("{WIRE},dns=203.0.113.2");
        let options = ["--net", &wire, "--profile", &rules, "--ask", "none"];
        let mut command = sandbox(&daemon, &options, &["python3", "-c", script]);
        said(&command.output().unwrap())
    };
    let shop = "'shop.test'\nport = 7000";
    let told = greeted([shop, "'*.flood.test'\nport = 1"]);
    assert!(told.contains("good morning"), "{told}");
    // The control: all of them are looked up by one rule.
    let told = greeted(["['shop.test', '*.flood.test']\nport = 1", shop]);
    assert!(told.contains("PermissionError"), "{told}");
    daemon.audit();
}

/// What is told of a server's name that is refused.
const NAMED: &str =
    "connect to evil.test (203.0.113.2) port 443 by tcp: it named this server by TLS";

/// A server of TLS on the station, which takes any name.
fn tls_server(lab: &Lab, station: &Station) -> Running {
    let [key, certificate] = secure::certificate(lab).unwrap();
    let mut server = station.netns.command("openssl");
    server
        .args(["s_server", "-accept", "203.0.113.2:443", "-www", "-quiet"])
        .args(["-key", &key, "-cert", &certificate]);
    let running = Running::start(server, lab, "openssl").unwrap();
    let listens = || station.netns.exec(&["ss", "-lnt"]).unwrap();
    eventually("the server is there", || {
        listens().contains("203.0.113.2:443")
    });
    running
}

#[test]
fn a_client_of_tls_names_the_server_that_was_allowed_and_no_other_at_the_same_address() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let station = greeter(&lab, &daemon);
    let _server = name_server(&lab, &station);
    let tls = tls_server(&lab, &station);
    let file = |name: &str| lab.dir().join(name).display().to_string();
    let rules = file("rules.toml");
    let allow = "default = 'deny'\n[[rule]]\nsay = 'allow'\nto = ['shop.test', 'bank.test']\n";
    std::fs::write(&rules, allow).unwrap();
    let (log, learnt) = (file("decisions.jsonl"), file("learnt.toml"));
    let run = |more: &str, options: &[&str], url: &str, by: &str| {
        let wire = format!("{WIRE},dns=203.0.113.2{more}");
        let own = ["--net", &wire, "--profile", &rules, "--ask", "none"];
        let options = [&own[..], options].concat();
        let by = format!("{by}:443:shop.test:443");
        let words = ["curl", "-sk", "--max-time", "2", "--connect-to", &by, url];
        let output = sandbox(&daemon, &options, &words).output().unwrap();
        let text = said(&output);
        (text.contains("s_server"), text)
    };
    let fetched = |more: &str, url: &str, by: &str| run(more, &["--log", &log], url, by);
    for (more, url, by, passes) in [
        ("", "https://shop.test/", "shop.test", true),
        // The name of another server, which rules allow, at this address.
        ("", "https://bank.test/", "bank.test", true),
        // The control: it is the fence that stops it.
        (",fence=off", "https://evil.test/", "evil.test", true),
        // Last: this server goes on waiting for the rest.
        ("", "https://evil.test/", "evil.test", false),
    ] {
        let (passed, text) = fetched(more, url, by);
        assert_eq!(passed, passes, "{url} {more}: {text}");
        assert_eq!(text.contains(NAMED), !passes, "{text}");
    }
    // It is a denial like any other, and the rule that it names allows it.
    let decisions = std::fs::read_to_string(&log).unwrap();
    let last: serde_json::Value = serde_json::from_str(decisions.lines().last().unwrap()).unwrap();
    assert_eq!(
        (&last["verdict"], &last["reason"]),
        (&"deny".into(), &"server-name".into())
    );
    let program = last["process"]["program"].as_str().unwrap();
    assert!(program.ends_with("/curl"), "{last}");
    let rule = last["allow_with"].as_str().unwrap();
    std::fs::write(&rules, format!("{allow}{rule}")).unwrap();
    drop(tls);
    let tls = tls_server(&lab, &station);
    let (passed, text) = fetched("", "https://evil.test/", "evil.test");
    assert!(passed && rule.contains(program), "{rule}{text}");
    // It is learnt, too, where the address alone is refused.
    let allow = allow.to_owned() + "[[rule]]\nsay = 'deny'\nto = '203.0.113.2'\nport = 443\n";
    std::fs::write(&rules, allow).unwrap();
    drop(tls);
    let _tls = tls_server(&lab, &station);
    let (passed, text) = run("", &["--learn", &learnt], "https://evil.test/", "evil.test");
    assert!(!passed && text.contains(NAMED), "{text}");
    let learnt = std::fs::read_to_string(&learnt).unwrap();
    assert!(learnt.contains("# to = \"evil.test\""), "{learnt}");
    daemon.audit();
}

#[test]
fn a_connection_by_name_says_that_name_though_another_one_is_by_number() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let station = greeter(&lab, &daemon);
    let _server = name_server(&lab, &station);
    let _tls = tls_server(&lab, &station);
    let rules = lab.dir().join("rules.toml");
    let allow = "default = 'deny'\n[[rule]]\nsay = 'allow'\nto = 'shop.test'\n\
                 [[rule]]\nsay = 'allow'\nprogram = '**/bash'\nto = '203.0.113.2'\n";
    std::fs::write(&rules, allow).unwrap();
    let rules = rules.display().to_string();
    let script = "import socket, ssl, subprocess, sys\n\
        mine = socket.create_connection(('shop.test', 443), 3)\n\
        command = 'exec 3<>/dev/tcp/203.0.113.2/443 && echo it connected'\n\
        print(subprocess.run(['bash', '-c', command], capture_output=True).stdout)\n\
        tls = ssl.create_default_context()\n\
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE\n\
        try:\n\
        \x20   tls.wrap_socket(mine, server_hostname=sys.argv[1])\n\
        \x20   print('it answered')\n\
        except OSError as error:\n\
        \x20   print(error)\n";
    for (more, name, passes) in [
        ("", "shop.test", true),
        // The control: it is the fence that stops it.
        (",fence=off", "evil.test", true),
        ("", "evil.test", false),
    ] {
        let wire = format!("{WIRE},dns=203.0.113.2{more}");
        let options = ["--net", &wire, "--profile", &rules, "--ask", "none"];
        let mut command = sandbox(&daemon, &options, &["python3", "-c", script, name]);
        let text = said(&command.output().unwrap());
        assert!(text.contains("it connected"), "by number: {text}");
        assert_eq!(text.contains("it answered"), passes, "{name}{more}: {text}");
        assert_eq!(text.contains(NAMED), !passes, "{text}");
    }
    daemon.audit();
}

#[test]
fn quic_is_asked_about_once_and_has_no_frame_if_nobody_answers() {
    let lab = Lab::new().unwrap();
    let config = open_to_all(&lab, "");
    let join = format!("uid:{USER}=lan0");
    let arguments = [
        "--config",
        &config,
        "--switch",
        "lan0",
        "--allow-join",
        &join,
    ];
    let daemon = Daemon::start(&lab, None, &arguments).unwrap();
    let station = greeter(&lab, &daemon);
    let server = quic_server(&lab, &station.netns).unwrap();
    let _server = Running::start(server, &lab, "gtlsserver").unwrap();
    let listens = || station.netns.exec(&["ss", "-lnu"]).unwrap();
    eventually("the server is there", || listens().contains(":4433"));
    let mut at_switch = daemon.port("host:lan0").filter(OWN).open().unwrap();
    let mut run = |name: &str, timeout: &str, reply: fn(&serde_json::Value) -> Option<Reply>| {
        let home = asking::home(&lab, &format!("home-{name}")).unwrap();
        let options = ["--net", WIRE, "--default", "ask", "--timeout", timeout];
        let words = ["sh", "-c", FETCH_BY_QUIC, "sh", "203.0.113.2"];
        let place = (&lab, None, name);
        let sandbox = Asking::start(daemon.command().unwrap(), place, &home, &options, &words);
        let asked = sandbox.unwrap().finish(reply).unwrap();
        assert_eq!(
            asked.asked(),
            ["gtlsclient connect udp 203.0.113.2:4433"],
            "{asked:#?}"
        );
        (asked.output.contains(PAGE), frames(&mut at_switch), asked)
    };
    let (fetched, frames, asked) = run("late", "300ms", |_| None);
    assert!(!fetched && frames == 0, "{asked:#?}");
    let (fetched, frames, asked) = run("quic", "60s", |_| {
        Some(Reply {
            say: "allow",
            life: "session",
            offer: 0,
        })
    });
    assert!(fetched && frames > 0, "{asked:#?}");
    daemon.audit();
}

#[test]
fn a_client_of_quic_names_the_server_that_was_allowed_and_no_other_at_the_same_address() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let station = greeter(&lab, &daemon);
    let _names = name_server(&lab, &station);
    let server = quic_server(&lab, &station.netns).unwrap();
    let _server = Running::start(server, &lab, "gtlsserver").unwrap();
    let listens = || station.netns.exec(&["ss", "-lnu"]).unwrap();
    eventually("the server is there", || listens().contains(":4433"));
    let rules = lab.dir().join("rules.toml");
    // The other one may be looked up, and spoken with elsewhere.
    let allow = "default = 'deny'\n[[rule]]\nsay = 'allow'\nto = 'shop.test'\n\
                 [[rule]]\nsay = 'allow'\nto = 'evil.test'\nport = 1\n\
                 [[rule]]\nsay = 'allow'\nto = 'loopback'\n\
                 [[rule]]\nsay = 'allow'\nprotocol = ['unix', 'netlink']\n";
    std::fs::write(&rules, allow).unwrap();
    let rules = rules.display().to_string();
    let mut clients = vec![FETCH_BY_QUIC];
    if std::env::var_os("VNPLUG_LONG").is_some() {
        // Its first message comes in two packets, in pieces and in any order.
        clients.push(BROWSE_BY_QUIC);
    }
    let cases = [
        ("", "shop.test", true),
        // The control: it is the fence that stops it.
        (",fence=off", "evil.test", true),
        ("", "evil.test", false),
    ];
    for (client, (more, name, passes)) in clients.iter().flat_map(|it| cases.map(|of| (it, of))) {
        let wire = format!("{WIRE},dns=203.0.113.2{more}");
        let options = ["--net", &wire, "--profile", &rules, "--ask", "none"];
        let script = format!("getent ahostsv4 shop.test && {client}");
        let words = ["sh", "-c", &script, "sh", name];
        let mut command = sandbox(&daemon, &options, &words);
        let text = said(&command.current_dir(lab.dir()).output().unwrap());
        assert_eq!(text.contains(PAGE), passes, "{name}{more}: {text}");
        let named = NAMED.replace("443 by tcp", "4433 by udp");
        assert_eq!(text.contains(&named), !passes, "{text}");
        for left in ["got", "profile"] {
            let _ = std::fs::remove_dir_all(lab.dir().join(left));
        }
    }
    daemon.audit();
}

/// A server on the station that gives addresses; what it says is in the file.
fn address_server(lab: &Lab, station: &Station, log: &str) -> Running {
    let file = |name: &str| format!("{}/{name}", lab.dir().display());
    let mut server = station.netns.command("dnsmasq");
    server.args([
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--port=0",
        "--no-ping",
        "--dhcp-authoritative",
        "--dhcp-range=203.0.113.50,203.0.113.59,255.255.255.0,120",
        "--dhcp-option=option:dns-server,203.0.113.2",
        "--pid-file=",
        "--user=root",
        &format!("--dhcp-leasefile={}", file("leases")),
        &format!("--log-facility={log}"),
        "--log-dhcp",
    ]);
    let running = Running::start(server, lab, "dnsmasq").unwrap();
    let listens = || station.netns.exec(&["ss", "-lnu"]).unwrap();
    eventually("the server is there", || listens().contains(":67"));
    running
}

#[test]
fn a_wire_without_an_address_has_the_one_that_somebody_gives_there() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let station = greeter(&lab, &daemon);
    let run = |seconds: u32| {
        let script = format!("cat /proc/net/fib_trie; sleep {seconds}; {GREET}");
        let options = ["--net", "lan0", "--default", "deny", "--ask", "none"];
        let rules = lab.dir().join("rules.toml").display().to_string();
        let options = [&options[..], &["--profile", &rules]].concat();
        let mut command = sandbox(&daemon, &options, &["bash", "-c", &script]);
        said(&command.output().unwrap())
    };
    let allow = "[[rule]]\nsay = 'allow'\nto = '203.0.113.2'\n";
    std::fs::write(lab.dir().join("rules.toml"), allow).unwrap();
    // The control: nobody is there who could give one.
    let told = run(0);
    assert!(told.contains("nobody gives an address"), "{told}");
    let log = lab.dir().join("dhcp.log").display().to_string();
    let _server = address_server(&lab, &station, &log);
    let told = run(0);
    assert!(told.contains("203.0.113.5"), "{told}");
    assert!(told.contains("good morning"), "{told}");
    // The program sends none of it: what the fence counts is its own.
    assert!(told.contains("0 denied"), "{told}");
    if std::env::var_os("VNPLUG_LONG").is_some() {
        let given = || {
            std::fs::read_to_string(&log)
                .unwrap()
                .matches("DHCPACK")
                .count()
        };
        let before = given();
        // After half of its time it is asked for longer.
        let told = run(65);
        assert!(told.contains("good morning"), "{told}");
        assert_eq!(
            given() - before,
            2,
            "{}",
            std::fs::read_to_string(&log).unwrap()
        );
    }
    daemon.audit();
}

#[test]
fn offline_has_a_loopback_interface_and_no_other() {
    let output = Command::new(program("vnplug").unwrap())
        .args([
            "sandbox",
            "--offline",
            "--default",
            "allow",
            "--",
            "bash",
            "-c",
        ])
        .arg("cat /proc/net/dev; exec 3<>/dev/tcp/203.0.113.2/7000")
        .output()
        .unwrap();
    let text = said(&output);
    assert!(text.contains(" lo:") && !text.contains("eth0"), "{text}");
    assert!(text.contains("unreachable"), "{text}");
}

#[test]
fn a_supervisor_that_is_killed_takes_the_wire_with_it() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let _station = greeter(&lab, &daemon);
    let ports = || value(counted(&daemon.counters(), "source"), "switch_ports");
    eventually("the greeter is alone", || ports() == 1);
    // The program goes on, without its interface.
    let script = "grep eth0 /proc/net/dev; while grep -q eth0 /proc/net/dev; do sleep 0.1; done; echo it is gone";
    let words = ["bash", "-c", script];
    let command = sandbox(&daemon, &["--net", WIRE, "--default", "allow"], &words);
    let mut running = Running::start(command, &lab, "sandbox").unwrap();
    eventually("it has joined", || {
        ports() == 2 && running.output().contains("eth0")
    });
    let supervisor = children(running.pid())[0];
    let pid = rustix::process::Pid::from_raw(supervisor.cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    eventually("its port is free", || ports() == 1);
    eventually("the program has no interface", || {
        running.output().contains("it is gone")
    });
    eventually("and it has ended", || running.status().is_some());
}

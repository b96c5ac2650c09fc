//! The demo of the sandbox: a program phones a place that it should not.
//!
//! ```text
//!   vnplug sandbox --net lan0 -- sh build.sh ──port── vnplugd --switch lan0 ── a machine that collects
//!          │ asks                                │
//!   who answers                             what passes that port is counted
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use vnplug::{Next, Port};

use super::recorder::output;
use crate::asking::{self, Asked, Asking, Reply};
use crate::daemon::Daemon;
use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::station::{Running, Station};
use crate::user::{USER, open_to_all};

struct Stage {
    vnplug: PathBuf,
    lab: Lab,
    daemon: Daemon,
    /// What the program sends and what is sent to it.
    wire: Port,
    collector: Running,
    _station: Station,
    start: Instant,
}

/// A run, and what was seen of it from outside.
struct Run {
    asked: Asked,
    frames: usize,
    /// What the machine that collects was told.
    collected: usize,
}

/// Runs the whole demo with this program and tells about it on standard output. What was not as it says:
/// empty is a success.
///
/// # Errors
/// Why it could not be carried through: something is missing on the machine, or a program failed.
pub fn sandbox(vnplug: &Path) -> Result<Vec<String>> {
    let mut stage = Stage::new(vnplug)?;
    let mut faults = Vec::new();
    stage.say("a switch lan0, and on it a machine, 203.0.113.2, that collects what it is told");
    stage.say("an ordinary user builds something that was downloaded; build.sh says:");
    SCRIPT.lines().for_each(|line| println!("    {line}"));
    let (user, other) = ("user", "other");
    for name in [user, other] {
        let script = asking::home(&stage.lab, name)?.join("build.sh");
        fs::write(&script, SCRIPT).map_err(LabError::io("write build.sh"))?;
    }

    let never = Reply {
        say: "deny",
        life: "always",
        offer: 1,
    };
    let first = stage.run(user, Some(never), &mut faults)?;
    stage.is(&first, 1, false, &mut faults);

    stage.say("what remains is a rule: $ vnplug sandbox rules list");
    let mut list = Command::new(&stage.vnplug);
    list.args(["sandbox", "rules", "list"]);
    asking::at_home(&mut list, &stage.lab.dir().join(user));
    list.current_dir("/");
    let rules = output(list)?;
    rules.lines().for_each(|line| println!("    {line}"));
    if !(rules.contains("answers:1") && rules.contains("to 203.0.113.2")) {
        faults.push("the rule is not in the list".to_owned());
    }

    stage.say("so the next run asks nothing");
    let second = stage.run(user, None, &mut faults)?;
    stage.is(&second, 0, false, &mut faults);

    stage.say("beside it, somebody who says yes, once");
    let yes = Reply {
        say: "allow",
        life: "once",
        offer: 0,
    };
    let third = stage.run(other, Some(yes), &mut faults)?;
    stage.is(&third, 1, true, &mut faults);

    println!(
        "\n  {:<28} {:>8} {:>16} {:>10}",
        "run", "asked", "frames on wire", "collected"
    );
    for (what, run) in [
        ("no, never", first),
        ("the rule remains", second),
        ("yes, once", third),
    ] {
        let asked = run.asked.questions.len();
        println!(
            "  {what:<28} {asked:>8} {:>16} {:>10}",
            run.frames, run.collected
        );
    }
    Ok(faults)
}

impl Stage {
    fn new(vnplug: &Path) -> Result<Self> {
        let start = Instant::now();
        let lab = Lab::new()?;
        let config = open_to_all(&lab, "");
        let join = format!("uid:{USER}=lan0");
        let words = [
            "--config",
            &config,
            "--switch",
            "lan0",
            "--allow-join",
            &join,
        ];
        let daemon = Daemon::start(&lab, None, &words)?;
        let station = Station::by_nic(&lab, &daemon, "lan0", "203.0.113.2", &[])?;
        let pages = lab.dir().join("pages/collect");
        let made = fs::create_dir_all(&pages);
        made.and_then(|()| fs::write(pages.join("index.html"), "thank you\n"))
            .map_err(LabError::io("make the page"))?;
        let mut httpd = station.netns.command("busybox");
        httpd.args(["httpd", "-f", "-vv", "-p", "80", "-h"]);
        httpd.arg(lab.dir().join("pages"));
        let collector = Running::start(httpd, &lab, "httpd")?;
        super::wire::until("the server listens", || {
            Ok(station.netns.exec(&["ss", "-lntH"])?.contains(":80"))
        })?;
        let filter = format!("ether host {MAC} and (ip or arp)");
        let wire = daemon.port("host:lan0").filter(&filter).open();
        let wire = wire.map_err(|error| LabError::Protocol(error.to_string()))?;
        Ok(Self {
            // It is started in the user's home.
            vnplug: vnplug.canonicalize().map_err(LabError::io("find vnplug"))?,
            lab,
            daemon,
            wire,
            collector,
            _station: station,
            start,
        })
    }

    fn say(&self, text: &str) {
        println!("[{:5.1} s] {text}", self.start.elapsed().as_secs_f64());
    }

    /// Runs the script in a sandbox on the switch; shows what is asked, and answers.
    fn run(&mut self, user: &str, reply: Option<Reply>, faults: &mut Vec<String>) -> Result<Run> {
        self.say("$ vnplug sandbox --net lan0,address=203.0.113.9/24 -- sh build.sh");
        let before = self.collected();
        let mut vnplug = Command::new(&self.vnplug);
        vnplug.arg("--socket").arg(self.daemon.socket());
        let net = format!("lan0,address=203.0.113.9/24,mac={MAC}");
        let home = self.lab.dir().join(user);
        let place = (&self.lab, None, user);
        let options = ["--net", &net, "--timeout", "20s"];
        let sandbox = Asking::start(vnplug, place, &home, &options, &["sh", "build.sh"])?;
        let asked = sandbox.finish(|question| {
            let lines = question["text"].as_array().into_iter().flatten();
            lines
                .filter_map(Value::as_str)
                .for_each(|line| println!("    {line}"));
            let word = match reply? {
                Reply { say: "allow", .. } => "y",
                Reply { offer, .. } => &format!("v{}", offer + 1),
            };
            println!("    answer: {word}");
            reply
        })?;
        for line in asked.output.lines().chain(asked.errors.lines()) {
            println!("    {line}");
        }
        if !asked.output.contains("built") {
            faults.push(format!("{user}: the build did not go on"));
        }
        // What is on its way arrives.
        thread::sleep(Duration::from_millis(200));
        let mut frames = 0;
        let lost = |error: vnplug::Error| LabError::Protocol(error.to_string());
        while let Next::Packet(_) = self.wire.next().map_err(lost)? {
            frames += 1;
        }
        let collected = self.collected() - before;
        self.say(&format!(
            "  {frames} frames of it on its wire, {collected} messages collected"
        ));
        Ok(Run {
            asked,
            frames,
            collected,
        })
    }

    fn collected(&self) -> usize {
        self.collector.errors().matches("response:200").count()
    }

    fn is(&self, run: &Run, questions: usize, allowed: bool, faults: &mut Vec<String>) {
        let seen = (run.asked.questions.len(), run.frames > 0, run.collected > 0);
        if seen != (questions, allowed, allowed) {
            let at = self.start.elapsed().as_secs_f64();
            faults.push(format!(
                "the run that ended at {at:.1} s: {} questions, {} frames, {} messages collected",
                run.asked.questions.len(),
                run.frames,
                run.collected
            ));
        }
    }
}

/// What phones home while it builds.
const SCRIPT: &str = "echo compiling…
curl -sS -m 9 http://203.0.113.2/collect/
echo built";
/// Of the program's interface.
const MAC: &str = "02:00:00:00:77:09";

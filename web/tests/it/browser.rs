//! Headless Chromium, driven by chromedriver with the few requests of the WebDriver protocol that the
//! tests need.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use vnplug_testing::{Deadline, eventually};

use crate::support::{TestDir, ask};

/// A browser with a profile of its own; what it downloads lies in `downloads`.
pub(crate) struct Browser {
    driver: Child,
    address: SocketAddr,
    session: String,
    pub(crate) downloads: TestDir,
    _profile: TestDir,
}

impl Browser {
    /// A window of this size, in light or dark colours.
    pub(crate) fn open(width: u32, height: u32, dark: bool) -> Self {
        let (profile, downloads) = (TestDir::new("web"), TestDir::new("web"));
        let mut command = Command::new("chromedriver");
        command.arg("--port=0").stdout(Stdio::piped());
        command.stderr(Stdio::null());
        // What the browser writes besides its profile stays there, too.
        command.env("HOME", &profile.0).env("TMPDIR", &profile.0);
        // A group of its own, so that browsers do not outlive a test that fails.
        command.process_group(0);
        let mut driver = command
            .spawn()
            .expect("chromedriver, which ./setup.sh installs");
        let stdout = BufReader::new(driver.stdout.take().unwrap());
        let port = stdout.lines().map_while(Result::ok).find_map(|line| {
            let (_, rest) = line.split_once("started successfully on port ")?;
            rest.trim_end_matches('.').parse::<u16>().ok()
        });
        let Some(port) = port else {
            panic!("chromedriver did not start: {:?}", driver.wait());
        };
        let mut browser = Self {
            driver,
            address: SocketAddr::from(([127, 0, 0, 1], port)),
            session: String::new(),
            downloads,
            _profile: profile,
        };
        let mut arguments = vec![
            "--headless=new".to_owned(),
            // Root has no sandbox, and containers forbid it; the pages are our own.
            "--no-sandbox".to_owned(),
            "--disable-gpu".to_owned(),
            "--disable-dev-shm-usage".to_owned(),
            "--no-first-run".to_owned(),
            format!("--window-size={width},{height}"),
            format!(
                "--user-data-dir={}",
                browser._profile.0.join("profile").display()
            ),
        ];
        if dark {
            arguments.push("--force-dark-mode".to_owned());
            arguments.push("--blink-settings=preferredColorScheme=0".to_owned());
        }
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome",
            "acceptInsecureCerts": true,
            "goog:chromeOptions": { "args": arguments, "prefs": {
                "download.default_directory": browser.downloads.0,
                "download.prompt_for_download": false,
            }},
            "goog:loggingPrefs": { "browser": "ALL" },
            "timeouts": { "script": 60_000, "pageLoad": 60_000 },
        }}});
        let session = browser.post("/session", &wanted);
        browser.session = format!("/session/{}", session["sessionId"].as_str().unwrap());
        browser
    }

    fn request(&self, method: &str, path: &str, body: &Value) -> Value {
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let host = self.address.to_string();
        let headers = [("Host", &host[..]), ("Content-Type", "application/json")];
        let answer = ask(self.address, method, path, &headers, body.as_bytes()).unwrap();
        let value = answer.json()["value"].clone();
        assert_eq!(answer.status, 200, "{method} {path}: {value}");
        value
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        self.request("POST", &format!("{}{path}", self.session), body)
    }

    pub(crate) fn go(&self, address: &str) {
        self.post("/url", &json!({ "url": address }));
    }

    /// Runs a script's body and gives what it returns.
    pub(crate) fn run(&self, script: &str) -> Value {
        self.post("/execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// An attribute `data-…` of an element; `null` if it has none.
    pub(crate) fn data(&self, element: &str, name: &str) -> Value {
        let script = format!("return document.getElementById('{element}').dataset.{name} ?? null");
        self.run(&script)
    }

    pub(crate) fn text(&self, element: &str) -> String {
        let text = self.run(&format!(
            "return document.getElementById('{element}').innerText"
        ));
        text.as_str().unwrap_or_default().to_owned()
    }

    /// Waits until a number that the page shows is this one.
    pub(crate) fn expect(&self, element: &str, name: &str, number: u64) {
        let what = format!("{element} has {name} = {number}");
        let wanted = number.to_string();
        eventually(&what, || self.data(element, name) == wanted);
    }

    fn element(&self, id: &str) -> String {
        let found = self.post(
            "/element",
            &json!({ "using": "css selector", "value": format!("#{id}") }),
        );
        let reference = found.as_object().and_then(|fields| fields.values().next());
        reference.and_then(Value::as_str).unwrap().to_owned()
    }

    pub(crate) fn click(&self, id: &str) {
        let element = self.element(id);
        self.post(&format!("/element/{element}/click"), &json!({}));
    }

    /// Types into a field, which is emptied before.
    pub(crate) fn write(&self, id: &str, text: &str) {
        let element = self.element(id);
        self.post(&format!("/element/{element}/clear"), &json!({}));
        self.post(
            &format!("/element/{element}/value"),
            &json!({ "text": text }),
        );
    }

    /// Presses a key while an element has the focus.
    pub(crate) fn press(&self, id: &str, key: &str) {
        self.run(&format!("document.getElementById('{id}').focus()"));
        self.actions(&json!([{ "type": "key", "id": "keys", "actions": [
            { "type": "keyDown", "value": key }, { "type": "keyUp", "value": key },
        ]}]));
    }

    /// Drags the mouse over an element, between two distances from its left edge.
    pub(crate) fn drag(&self, id: &str, from: f64, to: f64) {
        let script = format!(
            "const e = document.getElementById('{id}'); e.scrollIntoView({{block: 'center'}}); \
             const r = e.getBoundingClientRect(); return [r.left, r.top + r.height / 3]"
        );
        let place = self.run(&script);
        let (left, y) = (place[0].as_f64().unwrap(), place[1].as_f64().unwrap());
        let at = |x: f64| {
            json!({ "type": "pointerMove", "duration": 0, "origin": "viewport",
            "x": (left + x).round() as i64, "y": y.round() as i64 })
        };
        self.actions(
            &json!([{ "type": "pointer", "id": "mouse", "parameters": { "pointerType": "mouse" },
            "actions": [
                at(from), { "type": "pointerDown", "button": 0 }, at((from + to) / 2.0), at(to),
                { "type": "pointerUp", "button": 0 },
            ]}]),
        );
    }

    fn actions(&self, actions: &Value) {
        self.post("/actions", &json!({ "actions": actions }));
    }

    /// Waits for a file that was downloaded, and moves it there.
    pub(crate) fn downloaded(&self, to: &Path) {
        let mut found = None;
        eventually("the download is whole", || {
            let entries = fs::read_dir(&self.downloads.0).unwrap();
            let files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
            // While it runs it has another ending, and files without one are Chromium's.
            found = files
                .iter()
                .find(|file| {
                    let extension = file.extension().and_then(|ext| ext.to_str());
                    matches!(extension, Some("pcapng" | "pcap"))
                })
                .cloned();
            found.is_some() && files.len() == 1
        });
        fs::copy(found.as_ref().unwrap(), to).unwrap();
        fs::remove_file(found.unwrap()).unwrap();
    }

    /// Errors that the page's console has, but for answers that were refused.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let log = self.post("/se/log", &json!({ "type": "browser" }));
        let list = log.as_array().cloned().unwrap_or_default();
        let words = list.iter().filter_map(|entry| entry["message"].as_str());
        words
            .filter(|text| !text.contains("Failed to load resource"))
            .map(str::to_owned)
            .collect()
    }

    /// Writes what the window shows to `$VNPLUG_SCREENSHOTS/NAME.png`, if that is set.
    pub(crate) fn screenshot(&self, name: &str) {
        let Some(dir) = std::env::var_os("VNPLUG_SCREENSHOTS") else {
            return;
        };
        let image = self.request("GET", &format!("{}/screenshot", self.session), &Value::Null);
        let bytes = BASE64.decode(image.as_str().unwrap()).unwrap();
        fs::write(Path::new(&dir).join(format!("{name}.png")), bytes).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The browser ends with its session; the driver, and whatever is left, by a signal.
        if !self.session.is_empty() {
            let host = self.address.to_string();
            let _ = ask(
                self.address,
                "DELETE",
                &self.session,
                &[("Host", &host)],
                b"",
            );
        }
        let group = format!("-{}", self.driver.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
        let deadline = Deadline::new("the driver ends");
        while matches!(self.driver.try_wait(), Ok(None)) && !deadline.is_over() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

"""A server of notifications that presses one button of each: `notifications.py BUTTON PROGRAM [ARGUMENT…]`.

Prints what it is to show, as JSON, and ends with the program.
"""

import json
import subprocess
import sys

import dbus
import dbus.mainloop.glib
import dbus.service
from gi.repository import GLib

NAME = "org.freedesktop.Notifications"


class Server(dbus.service.Object):
    """https://specifications.freedesktop.org/notification-spec/"""

    @dbus.service.method(NAME, in_signature="susssasa{sv}i", out_signature="u")
    def Notify(self, app, _replaces, _icon, summary, body, actions, _hints, _wait):
        print(json.dumps({"app": app, "summary": summary, "body": body, "actions": actions}), flush=True)
        GLib.timeout_add(20, self.press)
        return 1

    def press(self):
        self.ActionInvoked(1, sys.argv[1])
        self.NotificationClosed(1, 2)
        return False

    @dbus.service.method(NAME, out_signature="as")
    def GetCapabilities(self):
        return ["body", "body-markup", "actions"]

    @dbus.service.method(NAME, out_signature="ssss")
    def GetServerInformation(self):
        return ("test", "vnplug", "1", "1.2")

    @dbus.service.signal(NAME, signature="us")
    def ActionInvoked(self, number, action):
        pass

    @dbus.service.signal(NAME, signature="uu")
    def NotificationClosed(self, number, reason):
        pass


def main():
    dbus.mainloop.glib.DBusGMainLoop(set_as_default=True)
    bus = dbus.SessionBus()
    name = dbus.service.BusName(NAME, bus)
    server = Server(bus, "/org/freedesktop/Notifications")
    program = subprocess.Popen(sys.argv[2:], stdout=subprocess.DEVNULL)
    loop = GLib.MainLoop()
    GLib.timeout_add(20, lambda: program.poll() is None or loop.quit())
    loop.run()
    del name, server
    return program.returncode


sys.exit(main())

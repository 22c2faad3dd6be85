"""A headless Chromium, asked through the DevTools protocol."""

import base64
import itertools
import json
import shutil
import subprocess
import time
from contextlib import contextmanager

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """The one page of a browser that :func:`browser` has started."""

    def __init__(self, socket):
        self._socket, self._numbers = socket, itertools.count(1)
        self.errors = []
        self.ask("Runtime.enable")
        self.ask("Page.enable")

    def ask(self, method, **parameters):
        """The result of a command."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        answer = self._wait(lambda message: message.get("id") == number)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _wait(self, wanted):
        """The first message that is wanted; errors of the page that come meanwhile are kept."""
        while True:
            message = json.loads(self._socket.recv(timeout=120))
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(message["params"]["exceptionDetails"])
            if wanted(message):
                return message

    def open(self, path, until="true"):
        """Open a file, wait for its end and for an expression to be true; returns the seconds that took."""
        began = time.perf_counter()
        self.ask("Page.navigate", url=path.resolve().as_uri())
        self._wait(lambda message: message.get("method") == "Page.loadEventFired")
        self.wait(until)
        return time.perf_counter() - began

    def wait(self, until):
        """Wait for an expression to be true."""
        deadline = time.perf_counter() + 120
        while not self.value(f"Boolean({until})"):
            assert time.perf_counter() < deadline, f"not true: {until}"
            time.sleep(0.02)

    def value(self, expression):
        """Value of the expression in the page, awaited if it is a promise."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path, whole=True):
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=whole)["data"]))


@contextmanager
def browser(folder, size=(1300, 900)):
    """A page in a browser with its files in `folder`; nothing of it is left running."""
    from websockets.sync.client import connect

    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")
    command = [PROGRAM, *flags, f"--window-size={size[0]},{size[1]}", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if line.startswith("DevTools listening on "):
                address = line.split()[-1]
                break
        else:
            raise AssertionError("Chromium has ended")
        with connect(address, max_size=None, open_timeout=60) as root:
            root.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
            targets = json.loads(root.recv())["result"]["targetInfos"]
        target = next(target["targetId"] for target in targets if target["type"] == "page")
        with connect(f"{address.split('/devtools')[0]}/devtools/page/{target}", max_size=None, open_timeout=60) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(30)
        process.stderr.close()
